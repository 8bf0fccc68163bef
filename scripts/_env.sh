# shellcheck shell=bash
# The environment of the scripts beside this file: .venv with the pinned packages. To be sourced, by bash:
#
#   source "$(dirname "$0")/_env.sh"
#   prepare_environment          # what a node needs; `prepare_environment dev` adds the development tools
#   prepare_compiled             # where GRAPEVINE_COMPILE=1 asks for it: see there
#   prepare_side clients         # .venv/clients: requirements/clients.txt and nothing else
#   prepare_chromium             # from Debian's packages, where that is allowed
#   exec "$PYTHON" ...
#
# A part is installed only when its lock file has changed. What pip says is in .venv/setup.log.
# Settings: PYTHON_FOR_VENV (the Python to use), GRAPEVINE_VENV (another place than .venv), GRAPEVINE_COMPILE.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${GRAPEVINE_VENV:-$ROOT/.venv}"
PYTHON="$VENV/bin/python"
SETUP_LOG="$VENV/setup.log"
# PyTorch's own index of CPU builds, for machines whose pip does not know them.
TORCH_CPU_INDEX="https://download.pytorch.org/whl/cpu"
# For `prepare_compiled` alone: the environment itself is of the sources, and a node knows no such setting.
COMPILE="${GRAPEVINE_COMPILE:-0}"
unset GRAPEVINE_COMPILE

say() { printf '%s\n' "$*" >&2; }

fail() {
    say "error: $1"
    shift
    for line in "$@"; do say "  $line"; done
    exit 1
}

# The first Python from 3.11 to 3.14 that runs here.
find_python() {
    local candidate
    for candidate in ${PYTHON_FOR_VENV:-python3 python3.13 python3.12 python3.11 python3.14}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "no Python from 3.11 to 3.14 was found (tried: ${PYTHON_FOR_VENV:-python3, python3.11 to python3.14})" \
        "install one (Debian, Ubuntu: sudo apt install python3 python3-venv)," \
        "or name one: PYTHON_FOR_VENV=/path/to/python3.12 $0"
}

make_venv() {
    local python
    # A copied or moved .venv, or one whose Python has gone, is made anew.
    if [[ "$("$PYTHON" -c 'import sys; print(sys.prefix)' 2>/dev/null)" == "$VENV" ]]; then
        "$PYTHON" -m pip --version >/dev/null 2>&1 && return
    fi
    python="$(find_python)" || exit 1
    "$python" -c 'import ensurepip, venv' 2>/dev/null || fail "$python cannot make virtual environments" \
        "Debian, Ubuntu: sudo apt install $("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
    say "making $VENV with $("$python" --version)"
    "$python" -m venv --clear "$VENV" || fail "$VENV could not be made" "remove it and try again: rm -rf $VENV"
}

# watched TITLE COMMAND...: output goes to the log, its end is shown when the command fails.
watched() {
    local title="$1" start="$SECONDS" job status=0 shown=0 before
    shift
    before="$(wc -l <"$SETUP_LOG")"
    printf -- '--- %s\n' "$*" >>"$SETUP_LOG"
    set -m # a process group of its own, so that all of it can be ended
    "$@" >>"$SETUP_LOG" 2>&1 9>&- &
    job=$!
    set +m
    # shellcheck disable=SC2064 # the job of now
    trap "kill -- -$job 2>/dev/null; exit 130" INT TERM
    while kill -0 "$job" 2>/dev/null; do
        sleep 1
        if ((SECONDS - start - shown >= (${#WATCHED_TTY} ? 1 : 20))); then
            shown=$((SECONDS - start))
            progress "$title" "$shown" "$(tail -n +"$before" "$SETUP_LOG" | grep -cE '^(Collecting|Processing) ')"
        fi
    done
    wait "$job" || status=$?
    trap - INT TERM
    [[ -n "$WATCHED_TTY" ]] && printf '\r\033[K' >&2
    if ((status)); then
        tail -n +"$before" "$SETUP_LOG" | grep -v '^Requirement already' | tail -n 15 | sed 's/^/  | /' >&2
        return "$status"
    fi
    say "$title: done in $((SECONDS - start)) s"
}

progress() {
    local found=""
    (($3)) && found=", $3 packages"
    if [[ -n "$WATCHED_TTY" ]]; then
        printf '\r\033[K%s ... %d s%s' "$1" "$2" "$found" >&2
    else
        say "$1 ... $2 s$found"
    fi
}

pip_install() { "$PYTHON" -m pip install --disable-pip-version-check --no-input --progress-bar off --no-deps "$@"; }

# install_list NAME [PYTHON]: what requirements/NAME.txt pins, each file checked against its hashes.
install_list() {
    PYTHON="${2:-$PYTHON}" pip_install --require-hashes -r "$ROOT/requirements/$1.txt"
}

install_torch() {
    pip_install -r "$ROOT/requirements/torch.txt" && return
    echo "--- PyTorch for CPUs is not where pip looks: trying PyTorch's own index"
    PIP_EXTRA_INDEX_URL="$TORCH_CPU_INDEX" pip_install -r "$ROOT/requirements/torch.txt"
}

# once NAME CHECKSUM TITLE COMMAND...: does nothing when it was done with the same checksum.
once() {
    local stamp="$VENV/.done-$1" sum="$2" title="$3"
    shift 3
    [[ "$(cat "$stamp" 2>/dev/null)" == "$sum" ]] && return
    watched "$title" "$@" || fail "$title failed" "all that was said: $SETUP_LOG"
    printf '%s\n' "$sum" >"$stamp"
}

checksum() { cat "$@" | sha256sum | cut -d' ' -f1; }

# prepare_side NAME: $VENV/NAME, an environment apart with what requirements/NAME.txt pins and nothing else.
prepare_side() {
    local side="$VENV/$1"
    prepare
    if [[ "$("$side/bin/python" -c 'import sys; print(sys.prefix)' 2>/dev/null)" != "$side" ]]; then
        rm -f "$VENV/.done-$1"
        "$PYTHON" -m venv --clear "$side" || fail "$side could not be made" "remove it and try again: rm -rf $side"
    fi
    once "$1" "$(checksum "$ROOT/requirements/$1.txt")" "installing requirements/$1.txt" \
        install_list "$1" "$side/bin/python"
    exec 9>&-
}

# Puts the packages with the gossip core compiled (setup.py) before the sources, for this script and what it starts. They
# are in $VENV/compiled, and made anew when any of their files has changed.
prepare_compiled() {
    [[ "$COMPILE" == [01] ]] || fail "GRAPEVINE_COMPILE is 1 to compile or 0 not to, but not '$COMPILE'"
    ((COMPILE)) || return 0
    prepare
    once dev "$(checksum "$ROOT/requirements/dev.txt")" "installing the development tools" install_list dev
    once compiled "$(checksum_of_packages)" "compiling the gossip core" install_compiled
    exec 9>&-
    export PYTHONPATH="$VENV/compiled${PYTHONPATH:+:$PYTHONPATH}"
    export PYTHONSAFEPATH=1 # Python would put the folder that it is started in, with the sources, before that
}

checksum_of_packages() {
    find "$ROOT"/{setup.py,pyproject.toml,gossip,kvmigrate,node} -type f ! -path '*/__pycache__/*' -print0 |
        sort -z | xargs -0 sha256sum | sha256sum | cut -d' ' -f1
}

install_compiled() {
    rm -rf "$VENV/compiled" "$VENV/.done-compiled"
    GRAPEVINE_COMPILE=1 pip_install --no-build-isolation --target "$VENV/compiled" "$ROOT"
}

# The browser that the tests of the page drive. Not having it fails nothing: those tests are skipped, and say so.
prepare_chromium() {
    local name
    for name in chromium chromium-browser google-chrome; do
        command -v "$name" >/dev/null && return
    done
    if ((EUID)) || ! command -v apt-get >/dev/null; then
        say "no Chromium here: the tests of the page will be skipped (Debian, Ubuntu: sudo apt install chromium)"
        return
    fi
    prepare
    watched "installing Chromium" install_chromium ||
        say "Chromium could not be installed: the tests of the page will be skipped; all that was said: $SETUP_LOG"
    exec 9>&-
}

install_chromium() {
    export DEBIAN_FRONTEND=noninteractive
    # A mirror that does not answer must not hold up the tests for long.
    local apt=(timeout 120 apt-get -o Acquire::Retries=0 -o Acquire::http::Timeout=10 -o Acquire::https::Timeout=10)
    "${apt[@]}" install --yes --no-install-recommends chromium && return
    "${apt[@]}" update && "${apt[@]}" install --yes --no-install-recommends chromium
}

# The environment itself, ours alone until descriptor 9 is closed.
prepare() {
    WATCHED_TTY=""
    [[ -t 2 ]] && WATCHED_TTY=yes
    # Two scripts at once would install over each other. The lock is on the directory and ends with the process.
    exec 9<"$ROOT"
    flock -n 9 || { say "waiting for another script that prepares $VENV" && flock 9; }
    make_venv
    : >>"$SETUP_LOG"
}

prepare_environment() {
    local lock="$ROOT/requirements"
    prepare
    once torch "$(checksum "$lock/torch.txt")" "installing PyTorch" install_torch
    once cpu "$(checksum "$lock/cpu.txt")" "installing vLLM and what it needs" install_list cpu
    if [[ "${1:-}" == dev ]]; then
        once dev "$(checksum "$lock/dev.txt")" "installing the development tools" install_list dev
    fi
    once project "$(checksum "$ROOT/pyproject.toml")$ROOT" "installing Grapevine" \
        pip_install --no-build-isolation --editable "$ROOT"
    once check "$(checksum "$VENV"/.done-{torch,cpu,project})" "checking the installation" \
        "$PYTHON" -c 'import gossip, kvmigrate, node, torch, transformers, vllm'
    exec 9>&-
}
