#!/usr/bin/env bash
# Trains on several hosts, one of them a spare, and starts the job again when it has left a last checkpoint.
#
#   examples/clusters/ssh.sh "node0 node1 node2" train.py --epochs 3
#
# ssh must ask for no password. The current directory and lightning-replica must have the same paths on all hosts, and
# the checkpoints must be on storage that all hosts share. Hosts that do not answer are left out as long as the rest
# is enough to train. Ctrl-C ends the job after a last checkpoint.
set -u

hosts=${1:?"usage: $0 \"HOST...\" SCRIPT [ARGUMENT...]"}
shift
spares=${SPARES:-1} # hosts that wait until another is lost
ranks=${RANKS:-1}   # on each host: Trainer(devices=RANKS, num_nodes=hosts - SPARES)
port=${PORT:-29500} # of the store, which the first host serves
store=${STORE:-}    # HOST:PORT of a `lightning-replica store`, if the first host is not to serve it
secret=${LIGHTNING_REPLICA_SECRET_FILE:-} # the same path on all hosts; see docs/trust.md

run=$(command -v lightning-replica) || { echo "$0: lightning-replica is not on the PATH." >&2; exit 2; }
id=$(hostname)-$$ # the store may serve other runs at the same time
nodes=$(($(wc -w <<<"$hosts") - spares))
options=(-o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3)
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT

# Every ssh reads from this pipe, and only this script holds the end into which nobody writes. When it is closed, or when
# this script or a connection dies, the host reads the end of its input and tells its node to end. So no host trains on
# without this script.
mkfifo "$folder/stay"
exec 3<>"$folder/stay"
exec 4<"$folder/stay"
# shellcheck disable=SC2016 # the host expands this
on_host='cd "$1" && shift || exit; exec 3<&0; "$@" </dev/null 3<&- & run=$!; '
# shellcheck disable=SC2016
on_host+='(read -r _ <&3; kill -TERM $run) >/dev/null 2>&1 & wait $run; code=$?; kill $! 2>/dev/null; exit $code'

told=
stop() {
    told=yes
    exec 3>&-
    trap - INT TERM HUP # the next one ends this script at once
}
trap stop INT TERM HUP

# start HOST COMMAND: runs one node, prints its output with the host before each line, and keeps its exit code
start() {
    # shellcheck disable=SC2029 # the command has its quotes already
    ssh "${options[@]}" "$1" "$2" <&4 2>&1 | while IFS= read -r line || [ -n "$line" ]; do
        printf '%s: %s\n' "$1" "$line"
    done
    echo "${PIPESTATUS[0]}" >"$folder/code-$1"
}

# verdict CODE...: the job's exit code. A lost node's own code, such as 255 of ssh, says nothing about the job.
verdict() {
    for code in 93 75 0 76 77 "$@"; do
        case " $* " in *" $code "*) return "$code" ;; esac
    done
}

code=1
while true; do
    up=()
    for host in $hosts; do
        if ssh "${options[@]}" -n "$host" true 3>&-; then up+=("$host"); fi
    done
    if [ "${#up[@]}" -lt "$nodes" ]; then
        echo "$0: ${#up[@]} hosts answer, and $nodes are needed." >&2
        exit "$code"
    fi
    if [ -n "$told" ]; then
        exit "$code"
    fi
    endpoint=${store:-${up[0]#*@}:$port}
    printf -v command '%q ' sh -c "$on_host" sh "$PWD" env ${secret:+"LIGHTNING_REPLICA_SECRET_FILE=$secret"} \
        "$run" run --nnodes "$nodes" --spares $((${#up[@]} - nodes)) \
        --nproc-per-node "$ranks" --rdzv-backend c10d --rdzv-endpoint "$endpoint" --rdzv-id "$id" "$@"
    rm -f "$folder"/code-*
    for host in "${up[@]}"; do
        start "$host" "$command" 3>&- &
    done
    until wait; do :; done # a signal interrupts it

    # shellcheck disable=SC2046 # the codes are words
    verdict $(cat "$folder"/code-*)
    code=$?
    if [ "$code" -ne 75 ] || [ -n "$told" ]; then
        exit "$code"
    fi
    echo "$0: the job has left a last checkpoint (exit code 75) and starts again from there."
done
