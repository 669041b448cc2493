# What is done on the workers: install, check, launch, look, stop, copy. Sourced by
# `tpu`. On a worker all lies in the folder bert_jax of the user's home.
# shellcheck shell=bash

help_install() {
    cat <<'END'
tpu install: puts bert_jax into a venv on all workers

  --from checkout   this checkout as it is now, what is not committed included, but
                    no file that git does not know                       (default)
  --from URL        git+https://github.com/ME/bert_jax@REF
  --extras LIST     of setup.py (data,tpu,gcs)
  --setup FILE      a script of yours that is run first on every worker: it mounts
                    a disk, say; it is run again after a preemption

Example:
  tpu install --settings tpu.env --setup mount_disk.sh
END
}

install() {
    local from=${setting[from]} scratch=$checkout/build/tpu
    local files=("$here/install_on_worker" "$here/run_on_worker")
    run mkdir -p "$scratch"
    if [[ $from == checkout ]]; then
        pack "$scratch/source.tar.gz"
        files+=("$scratch/source.tar.gz")
    fi
    if [[ -n ${setting[setup]} ]]; then
        [[ -f ${setting[setup]} ]] || fail "--setup ${setting[setup]}: no such file"
        run cp "${setting[setup]}" "$scratch/setup"
        files+=("$scratch/setup")
    fi
    run_at all sh -c "rm -rf bert_jax/incoming && mkdir -p bert_jax/incoming"
    run gcloud compute tpus tpu-vm scp "${files[@]}" "$name:bert_jax/incoming/" \
        "${where[@]}" --worker=all
    run_at all bash bert_jax/incoming/install_on_worker "${setting[extras]}" "$from"
}

# The files of the checkout that git knows, as they are now.
pack() {
    local tree
    tree=$(git -C "$checkout" -c user.name=tpu -c user.email=tpu@localhost \
        stash create) || fail "$checkout is no git checkout: give --from URL"
    run git -C "$checkout" archive --format=tar.gz "--output=$1" "${tree:-HEAD}"
}

help_run() {
    cat <<'END'
tpu run: runs a command on all workers, or one, and waits for its end

  --worker N   all (default), or the number of one

Example:
  tpu run --settings tpu.env -- df -h
END
}

run_words() {
    ((${#rest[@]})) || fail "what to run is missing: -- COMMAND"
    run_at "${setting[worker]}" "${rest[@]}"
}

help_launch() {
    cat <<'END'
tpu launch: starts the same command on all workers, and leaves it running there

Each worker gets BERT_JAX_HOSTS and BERT_JAX_HOST, writes bert_jax/jobs/JOB/log, and
starts the command again when it ends with 75 ("preempted, or a worker was lost").

  --job JOB       its name (train)
  --restarts N    on the workers, without another launch (10)
  --pause S       seconds before each (10)

Example:
  tpu launch --settings tpu.env -- bert_jax train --config bert \
      --workdir shared/base --config.data=shared/corpus
END
}

# launch [WORKERS]
launch() {
    ((${#rest[@]})) || fail "what to run is missing: -- COMMAND"
    run_at "${1:-all}" bert_jax/run_on_worker start --job "${setting[job]}" \
        --restarts "${setting[restarts]}" --pause "${setting[pause]}" -- "${rest[@]}"
}

help_status() {
    cat <<'END'
tpu status: of each worker, whether the job runs or how it ended

Example:
  tpu status --settings tpu.env --job train
END
}

status() {
    run_at all bert_jax/run_on_worker status --job "${setting[job]}"
}

help_logs() {
    cat <<'END'
tpu logs: the end of the logs, each line with the number of its worker

  --follow     and what comes (Ctrl-C ends the looking, not the job)
  --worker N   all (default), or the number of one
  --job JOB    (train)

Example:
  tpu logs --settings tpu.env --worker 0 --follow
END
}

logs() {
    local follow=()
    [[ ${setting[follow]} == no ]] || follow=(--follow)
    run_at "${setting[worker]}" bert_jax/run_on_worker logs --job "${setting[job]}" \
        "${follow[@]}"
}

help_stop() {
    cat <<'END'
tpu stop: SIGTERM to the job on all workers; waits while it saves

Example:
  tpu stop --settings tpu.env --job train
END
}

stop() {
    run_at all bert_jax/run_on_worker stop --job "${setting[job]}"
}

help_send() {
    cat <<'END'
tpu send: copies a file or folder to the same place on all workers

  --worker N   all (default), or the number of one

Example:
  tpu send --settings tpu.env --worker 0 corpus shared/corpus
END
}

help_fetch() {
    cat <<'END'
tpu fetch: copies a file or folder from a worker to this machine

  --worker N   the number of the worker (0)

Example:
  tpu fetch --settings tpu.env shared/base runs/base
END
}

copy() {
    local command=$1 worker=${setting[worker]} here_path there_path
    ((${#rest[@]} == 2)) || fail "$command takes two paths (tpu $command --help)"
    here_path=${rest[0]} there_path=${rest[1]}
    [[ $command == send ]] || here_path=${rest[1]} there_path=${rest[0]}
    # The shell of the worker reads its path.
    [[ $there_path =~ ^[A-Za-z0-9_./~@%+=,-]+$ ]] ||
        fail "$there_path: a path on a worker has letters, digits and _./~@%+=,- only"
    # gcloud takes what stands before a colon for a machine.
    [[ $here_path == /* || $here_path == ./* ]] || here_path=./$here_path
    if [[ $command == send ]]; then
        set -- "$here_path" "$name:$there_path"
    else
        [[ $worker != all ]] || worker=0
        set -- "$name:$there_path" "$here_path"
    fi
    run gcloud compute tpus tpu-vm scp --recurse "$@" "${where[@]}" "--worker=$worker"
}
