#!/usr/bin/env bash
# The newcomer's walk, as README.md tells it: a fresh clone, `make run`, the
# commands of the README with their answers compared, kill -9 of the worker and
# the API under load, Ctrl-C, nothing left running, and another start that finds
# yesterday's orders.
#
# The commands and answers are read from README.md, so they cannot drift from
# what the service does. Postgres is fetched anew, into a cache of the walk's
# own; Go's build cache is the user's.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
clone=$work/clone
home=$clone/.onceledger
GOCACHE=$(go env GOCACHE) GOMODCACHE=$(go env GOMODCACHE)
export GOCACHE GOMODCACHE
export XDG_CACHE_HOME=$work/cache ONCELEDGER_ADDR=127.0.0.1:0
unset ONCELEDGER_HOME ONCELEDGER_POSTGRES_BIN DATABASE_URL KAFKA_BROKERS BASE_URL API_KEY
job='' smoke=''

say() { printf 'walk %3ds  %s\n' "$SECONDS" "$*"; }

die() {
  say "FAILED: $*"
  for file in "$work"/stderr "$home"/logs/*.log; do
    [ -s "$file" ] && printf -- '--- the end of %s\n' "$file" && tail -n 15 "$file" | cut -c 1-300
  done
  exit 1
}

# ours lists the processes whose program is in the walk's folder: the clone's
# own, and the Postgres that it fetched.
ours() {
  local proc exe
  for proc in /proc/[0-9]*; do
    exe=$(readlink "$proc/exe" 2>/dev/null) || continue
    case $exe in "$work"/*) echo "${proc#/proc/}" ;; esac
  done
}

cleanup() {
  trap - EXIT
  [ -z "$smoke" ] || kill -KILL -- "-$smoke" 2>/dev/null || true
  if [ -n "$(ours)" ]; then
    [ -z "$job" ] || kill -INT -- "-$job" 2>/dev/null || true
    for _ in $(seq 100); do [ -n "$(ours)" ] || break; sleep 0.1; done
    for pid in $(ours); do kill -KILL "$pid" 2>/dev/null || true; done
  fi
  rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 130' INT TERM HUP

# wait_for SECONDS WHAT COMMAND… repeats the command until it succeeds.
wait_for() {
  local end=$((SECONDS + $1)) what=$2
  shift 2
  until "$@"; do
    [ "$SECONDS" -lt "$end" ] || die "waited in vain for $what"
    sleep 0.05
  done
}

in_clone() { cd "$clone" && exec "$@"; }

# background starts a command as a terminal would: in a process group of its own,
# and without its Ctrl-C being ignored.
background() {
  set -m
  "$@" &
  started=$!
  set +m
}

# run SECONDS COMMAND… starts the service in the background, and returns when it
# says that it is ready.
run() {
  local seconds=$1 began=$SECONDS
  shift
  background in_clone "$@" >"$work/stdout" 2>"$work/stderr"
  job=$started
  is_ready() {
    grep -q '^ready http://' "$work/stdout" && return
    kill -0 "$job" 2>/dev/null || die "it ended before it was ready"
    return 1
  }
  wait_for "$seconds" "the ready line" is_ready
  url=$(sed -n 's/^ready //p' "$work/stdout")
  took=$((SECONDS - began))
}

supervisor() { cat "$home/lock"; }

pid_of() {
  local pid
  for pid in $(ours); do
    [ "$(readlink "/proc/$pid/exe")" != "$clone/bin/$1" ] || echo "$pid"
  done
}

ports() { grep -ohE '127\.0\.0\.1:[0-9]+' "$home/connections.json" "$work/stdout" | sort -u | cut -d : -f 2; cat "$home/worker-port"; }

is_gone() { [ -z "$(ours)" ]; }

nothing_left() {
  wait_for "$1" "the last process to end" is_gone
  for port in $(ports); do
    ! (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || die "somebody still listens on port $port"
  done
}

# answers reads what the API says, as the README does.
answers() { curl -sS -H "Authorization: Bearer $(cat "$home/api-key")" "$url$1"; }

readyz() { curl -sSf -o /dev/null "$url/readyz" 2>/dev/null; }

# kill_and_return kills a program with -9 and waits until there is another.
kill_and_return() {
  local name=$1 old new=
  old=$(pid_of "$name")
  [ -n "$old" ] || die "no $name runs"
  kill -KILL "$old"
  is_back() { new=$(pid_of "$name") && [ -n "$new" ] && [ "$new" != "$old" ]; }
  wait_for 30 "another $name" is_back
  wait_for 60 "the pipeline to be ready again" readyz
  grep -q "^$name ended" "$work/stderr" || die "the supervisor did not say that $name had ended"
}

# plain leaves out of an answer the white space and what differs from run to run.
plain() {
  tr -d '[:space:]' <"$1" | sed -E \
    -e 's/[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}/ID/g' \
    -e 's/[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]+Z/TIME/g' \
    -e 's/(INV|CN)-[0-9]{4}-/\1-YEAR-/g' \
    -e 's/"(partition|offset)":[0-9]+/"\1":N/g'
}

# read_the_readme splits the console blocks of README.md between the marks into
# commands and their answers: 01.command, 01.answer, 02.command, …
read_the_readme() {
  mkdir "$work/readme"
  awk -v dir="$work/readme" '
    /<!-- walk -->/  { walk = 1 }
    /<!-- \/walk -->/ { walk = 0 }
    /^```/ { block = walk && !block && /^```console$/; continued = 0; next }
    !block { next }
    continued { print > (file ".command"); continued = /\\$/; next }
    sub(/^\$ /, "") {
      file = sprintf("%s/%02d", dir, ++n)
      print > (file ".command"); printf "" > (file ".answer"); continued = /\\$/; next
    }
    { print > (file ".answer") }' "$clone/README.md"
  steps=$(find "$work/readme" -name '*.command' | wc -l)
  [ "$steps" -ge 8 ] || die "README.md has $steps commands between its walk marks"
}

# follow_the_readme does what a reader would, in one shell. What only reads may
# be asked again: the reader is slower than this script, and the worker is not.
follow_the_readme() {
  local file command got end
  cd "$clone"
  for file in "$work"/readme/*.command; do
    command=$(sed "s#http://127\.0\.0\.1:8080#$url#g" "$file")
    got=${file%.command}.got
    end=$((SECONDS + 10))
    while eval "$command" >"$got" 2>&1 || true; do
      [ "$(plain "$got")" != "$(plain "${file%.command}.answer")" ] || break
      case $command in *" -d "*) end=0 ;; esac
      if [ "$SECONDS" -ge "$end" ]; then
        printf -- '--- README.md says of\n%s\n--- this\n%s\n--- and got this\n%s\n' \
          "$(cat "$file")" "$(cat "${file%.command}.answer")" "$(cat "$got")"
        die "the README does not tell what happens"
      fi
      sleep 0.1
    done
  done
  cd "$work"
}

verify() { (cd "$clone" && bin/onceledger verify --wait 60s) >"$work/verify" || { cat "$work/verify"; die "the books are wrong"; }; }

git clone --quiet "$root" "$clone"
say "cloned $(git -C "$clone" rev-parse --short HEAD)"

run 600 make run
say "make run was ready after ${took}s at $url"
[ "$(stat -c %a "$home/api-key")" = 600 ] || die "others can read the API key"

read_the_readme
follow_the_readme
order=$ORDER # the README's
say "the $steps commands of the README were answered as it says"

BASE_URL=$url VUS=4 ITERATIONS=60 MAX_COMPLETE_MS=60000 \
  background in_clone node test/k6/run.mjs load/k6/smoke.js >"$work/smoke" 2>&1
smoke=$started
kills=0
while kill -0 "$smoke" 2>/dev/null && [ "$kills" -lt 6 ]; do
  kill_and_return worker
  kill_and_return api
  kills=$((kills + 2))
done
wait "$smoke" || { cat "$work/smoke"; die "the smoke test failed while worker and API were killed"; }
[ "$kills" -ge 4 ] || die "the load was over after $kills kills"
verify
say "worker and API were killed $kills times under load and came back: $(grep -c '^✓' "$work/smoke") kinds of checks hold; $(tail -n 1 "$work/verify")"

kill -INT -- "-$job" # what a terminal does on Ctrl-C: to make as well
status=0; wait "$job" || status=$?
[ "$status" = 130 ] || die "make ended with $status on Ctrl-C, want 130 for 'interrupted'"
! grep -q '\*\*\*' "$work/stderr" || die "make complains after Ctrl-C"
nothing_left 3
say "Ctrl-C stopped everything"

run 60 make run
[ "$took" -le 20 ] || die "the second start took ${took}s"
[[ $(answers "/v1/orders/$order") == *'"status":"paid"'* ]] || die "yesterday's order is not there"
say "the second make run was ready after ${took}s and has yesterday's order"

kill -KILL "$(supervisor)"
wait "$job" 2>/dev/null || true
nothing_left 20
say "kill -9 of the supervisor itself left nothing running"

run 60 make run
[[ $(answers "/v1/orders/$order/receipt") == *'"complete":true'* ]] || die "yesterday's receipt is not there"
verify
kill -INT "$(supervisor)"
status=0; wait "$job" || status=$?
[ "$status" = 0 ] || die "onceledger up ended with $status when it was asked to stop"
nothing_left 3
say "the third start recovered from that after ${took}s; asked to stop, it ended with 0"

if [ "$(id -u)" = 0 ]; then
  # The same binaries as a user without a home, a passwd entry of his own or caches.
  chmod 755 "$work"
  install -d -o 65534 -g 65534 "$work/nobody"
  home=$work/nobody/data
  run 60 setpriv --reuid=65534 --regid=65534 --clear-groups \
    env HOME=/nonexistent XDG_CACHE_HOME= ONCELEDGER_HOME="$home" "$clone/bin/onceledger" up
  kill -INT "$(supervisor)"
  status=0; wait "$job" || status=$?
  [ "$status" = 0 ] || die "onceledger up ended with $status when nobody asked it to stop"
  nothing_left 3
  say "it works for another user than root as well (ready after ${took}s)"
fi
say "done"
