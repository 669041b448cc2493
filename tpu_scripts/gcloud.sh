# How `tpu` calls other programs: shown or run, and never with a word that a shell
# would read as something else. Sourced by `tpu`.
# shellcheck shell=bash

fail() {
    echo "error: $*" >&2
    exit 1
}

say() {
    echo "$(date -u +%T) $*" >&2
}

# Words as a shell has to be given them.
quote() {
    local word line=
    for word in "$@"; do
        if [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]]; then
            line+=" $word"
        else
            line+=" ${word@Q}"
        fi
    done
    echo "${line# }"
}

# Runs a command, or only shows it; one that fails ends everything.
run() {
    local code=0
    if [[ $dry_run == yes ]]; then
        quote "$@"
        return
    fi
    "$@" || code=$?
    ((code == 0)) || fail "this ended with exit code $code: $(quote "$@")"
}

# The same on workers: run_at all|NUMBER WORDS...
run_at() {
    local worker=$1
    shift
    run gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" "--worker=$worker" \
        "--command=$(quote "$@")"
}

# What `gcloud compute tpus GROUP describe` says in one field; GONE if there is none.
# In a dry run the command is shown, and the answer is the one that is hoped for.
describe() {
    local group=$1 field=$2 hoped=$3 found problem
    local call=(gcloud compute tpus "$group" describe "$name" "${where[@]}"
        "--format=value($field)")
    if [[ $dry_run == yes ]]; then
        quote "${call[@]}" >&3
        echo "$hoped"
        return
    fi
    problem=$(mktemp)
    if found=$("${call[@]}" 2>"$problem"); then
        echo "${found:-UNKNOWN}"
    elif grep -q NOT_FOUND "$problem"; then
        echo GONE
    else
        cat "$problem" >&2
        rm "$problem"
        fail "the state of $name is not known: $(quote "${call[@]}")"
    fi
    rm "$problem"
}
