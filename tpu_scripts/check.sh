# Whether the slice can do the run, before it is launched. Sourced by `tpu`.
# shellcheck shell=bash

help_check() {
    cat <<'END'
tpu check: all workers see all devices and the data, have the same versions, and room

Every worker looks for itself (python -m bert_jax.pod) and the answers are compared
here, for which this machine needs Python 3.11 and nothing else.

  --data CORPUS     the corpus of the run, as the workers find it
  --workdir DIR     the workdir of the run, which all workers have to share
  --room GB         that has to be free there (10)

Example:
  tpu check --settings tpu.env --data shared/corpus --workdir shared/base
END
}

check() {
    local answers=$checkout/build/tpu/answers code=0
    local look=(bert_jax/run_on_worker run -- python -m bert_jax.pod)
    [[ -z ${setting[data]} ]] || look+=(--data "${setting[data]}")
    [[ -z ${setting[workdir]} ]] || look+=(--workdir "${setting[workdir]}")
    run rm -rf "$answers"
    run mkdir -p "$answers"
    # One file a worker; one that fails has said why in its file.
    (run gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker=all \
        "--command=$(quote "${look[@]}")" "--output-directory=$answers") || code=$?
    run env "PYTHONPATH=$checkout" python3 -m bert_jax.pod --compare "$answers" \
        --room "${setting[room]}"
    ((code == 0)) || fail "not all workers could look"
}
