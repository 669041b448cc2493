# A run that outlives its machines: creates what is missing, installs, launches, looks
# again and again, and does it once more after a preemption. Sourced by `tpu`.
# shellcheck shell=bash

help_watch() {
    cat <<'END'
tpu watch: keeps a job running until it has ended, whatever is preempted

Where the slice is gone it is created again and installed; where the job does not run
it is launched. Ends with 0 when the command has ended with 0 on all workers, and with
an error when a worker ended with anything but 75, or after too many tries. Ctrl-C ends
the watching, not the job. A job that has ended is not begun again: another command is
another --job. Takes the options of create, install and launch, and

  --tries N    how often it creates or launches again (20)
  --every S    seconds between two looks (30)

Example:
  tpu watch --settings tpu.env -- bert_jax train --config bert \
      --workdir shared/base --config.data=shared/corpus
END
}

PATIENCE=5 # looks in a row that lead to nothing

watch() {
    local state ended=no missed=0 tries_left=${setting[tries]}
    ((${#rest[@]})) || fail "what to run is missing: -- COMMAND"
    need accelerator-type runtime-version
    while :; do
        state=$(find_state) || state=UNKNOWN
        if [[ $state == FAILED ]]; then
            fail "$name is FAILED: $(explain FAILED)"
        elif is_lost "$state"; then
            take_try "$name is $state: $(explain "$state")"
            # The next look sees what went wrong here.
            if [[ $state == GONE ]] || (remove); then
                (request) || :
            fi
        elif [[ $state == READY ]] && look_at_job && go_on; then
            missed=0
        elif [[ $state == READY || $state == UNKNOWN ]]; then
            missed=$((missed + 1))
            say "that led to nothing, $missed of $PATIENCE times"
            ((missed < PATIENCE)) || fail "given up: see the errors above"
        else
            say "$name is $state"
        fi
        [[ $ended == no && $dry_run == no ]] || return 0
        sleep "${setting[every]}"
    done
}

take_try() {
    ((tries_left > 0)) || fail "$1; given up after ${setting[tries]} tries"
    tries_left=$((tries_left - 1))
    say "$1; tries again, $tries_left more at most"
}

# Fills `states` with what each worker says of the job; false if not all answer. One on
# which nothing is installed knows neither its number nor how many there are.
look_at_job() {
    local answer line count=0
    local look="if [ -x bert_jax/run_on_worker ]; then bert_jax/run_on_worker status \
--job ${setting[job]}; else echo missing; fi"
    states=()
    if [[ $dry_run == yes ]]; then
        run_at all sh -c "$look"
        states=(none)
        return
    fi
    answer=$(run_at all sh -c "$look") || return 1
    while read -r line; do
        if [[ $line =~ ^worker\ ([0-9]+)\ of\ ([0-9]+):\ (.+)$ ]]; then
            states[BASH_REMATCH[1]]=${BASH_REMATCH[3]}
            count=${BASH_REMATCH[2]}
        elif [[ $line == missing ]]; then
            states=(missing)
            return
        fi
    done <<<"$answer"
    ((count > 0 && ${#states[@]} == count))
}

# Does what follows from `states`; false if that could not be done. A worker that has
# given up is launched also where others still run: they wait for it.
go_on() {
    local worker well=0 idle=no begun=no resting=()
    for worker in "${!states[@]}"; do
        case ${states[worker]} in
            missing) (install) && (launch); return ;;
            none) idle=yes ;;
            "exited 75") idle=yes begun=yes ;;
            "exited 0") well=$((well + 1)) begun=yes ;;
            running) begun=yes && continue ;;
            stopped*) fail "job ${setting[job]} was stopped by \`tpu stop\`" ;;
            *) end_with_error "$worker" "${states[worker]}" ;;
        esac
        resting+=("$worker")
    done
    if ((well == ${#states[@]})); then
        say "job ${setting[job]} has ended well on all ${#states[@]} workers"
        ended=yes
    elif [[ $idle == yes ]]; then
        [[ $begun == no ]] || take_try "job ${setting[job]} was interrupted"
        ((${#resting[@]} < ${#states[@]})) || resting=(all)
        (launch "$(IFS=, && echo "${resting[*]}")")
    fi
}

end_with_error() {
    local worker=$1 state=$2
    setting[worker]=$worker
    (logs) || :
    (stop) || :
    fail "job ${setting[job]} on worker $worker $state: starting it again would not" \
        "mend that. The end of its log is above; the others were stopped"
}
