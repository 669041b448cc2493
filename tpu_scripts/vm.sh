# The slice itself: create, wait, what state it is in, delete. Sourced by `tpu`.
# shellcheck shell=bash

help_create() {
    cat <<'END'
tpu create: creates a TPU VM, or with --queued a queued resource, and waits for it

  --accelerator-type T        v5litepod-16, v4-32, v6e-8, ...       (needed)
  --runtime-version V         v2-alpha-tpuv5-lite, tpu-ubuntu2204-base, ...  (needed)
  --queued                    as a queued resource: waits until there is one free
  --spot                      cheaper, may be preempted
  --valid-until-duration D    how long a queued resource waits for its turn: 6h, 2d
  --every S                   seconds between two looks (30)

Example:
  tpu create --name berta --zone us-west4-a --queued --spot \
      --accelerator-type v5litepod-16 --runtime-version v2-alpha-tpuv5-lite
END
}

create() {
    request
    wait_until_ready
}

request() {
    local spot=() until=()
    need accelerator-type runtime-version
    [[ ${setting[spot]} == no ]] || spot=(--spot)
    if [[ ${setting[queued]} == no ]]; then
        run gcloud compute tpus tpu-vm create "$name" "${where[@]}" \
            "--accelerator-type=${setting[accelerator-type]}" \
            "--version=${setting[runtime-version]}" "${spot[@]}"
    else
        [[ -z ${setting[valid-until-duration]} ]] ||
            until=("--valid-until-duration=${setting[valid-until-duration]}")
        run gcloud compute tpus queued-resources create "$name" "${where[@]}" \
            "--node-id=$name" "--accelerator-type=${setting[accelerator-type]}" \
            "--runtime-version=${setting[runtime-version]}" "${spot[@]}" \
            "${until[@]}" --async
    fi
}

# READY, or why not: the state of the request until it is ACTIVE, then of the machines.
find_state() {
    local state
    if [[ ${setting[queued]} == yes ]]; then
        state=$(describe queued-resources state.state ACTIVE) || return
        if [[ $state != ACTIVE ]]; then
            echo "$state"
            return
        fi
    fi
    describe tpu-vm state READY
}

# What one can do about a state in which there is nothing to wait for.
explain() {
    case $1 in
        FAILED) echo "the request cannot be met (quota? no such accelerator or" \
            "runtime in this zone? valid-until-duration over?)" ;;
        SUSPENDED | PREEMPTED) echo "it was preempted" ;;
        TERMINATED | STOPPED) echo "it was stopped" ;;
        GONE) echo "there is none of this name" ;;
    esac
}

is_lost() {
    [[ -n $(explain "$1") ]]
}

wait_until_ready() {
    local state before=
    while :; do
        state=$(find_state)
        [[ $state != READY ]] || break
        [[ $state == "$before" ]] || say "$name is $state"
        before=$state
        if is_lost "$state"; then
            fail "$name is $state: $(explain "$state"). \`tpu delete\` clears it away"
        fi
        sleep "${setting[every]}"
    done
    say "$name is READY"
}

help_state() {
    cat <<'END'
tpu state: what the slice is doing: READY, WAITING_FOR_RESOURCES, PREEMPTED, GONE, ...

Example:
  tpu state --settings tpu.env
END
}

state() {
    local found
    found=$(find_state)
    [[ $dry_run == yes ]] || echo "$found${found:+ }$(explain "$found")"
}

help_delete() {
    cat <<'END'
tpu delete: deletes the slice with all that is on its disks

  --yes    without asking

Example:
  tpu delete --settings tpu.env --yes
END
}

delete() {
    local answer=
    if [[ ${setting[yes]} == no && $dry_run == no ]]; then
        [[ -t 0 ]] || fail "delete asks first, and there is nobody to ask: --yes"
        read -r -p "Delete $name with all that is on its disks? Type its name: " answer
        [[ $answer == "$name" ]] || fail "$name was not deleted"
    fi
    remove
}

remove() {
    if [[ ${setting[queued]} == yes ]]; then
        run gcloud compute tpus queued-resources delete "$name" "${where[@]}" \
            --force --quiet
    else
        run gcloud compute tpus tpu-vm delete "$name" "${where[@]}" --quiet
    fi
}
