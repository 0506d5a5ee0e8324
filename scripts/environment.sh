# Sourced by the other scripts: finds a Python and manages virtual environments in the repository's root.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# With an empty HOME pip would use a cache in the root directory.
[ -n "${HOME:-}" ] || unset HOME
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_INPUT=1
# Container images often set it. Then every process would compile all modules: a second for each rank of a test.
unset PYTHONDONTWRITEBYTECODE

# pytest's options for three processes, a file of tests at a time: tests often wait, so that three are faster than two
# also on two processors. A test fails if files are left in /dev/shm, so each process mounts its own (tests/conftest.py);
# a user who may not mount has one process.
PROCESSES=()
if unshare --mount true 2>/dev/null; then PROCESSES=(-n 3 --dist loadfile); fi

fail() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

# Print the path of a Python that can create environments: $PYTHON, python3 or python.
find_python() {
    local candidate found="" reason=""
    for candidate in ${PYTHON:+"$PYTHON"} python3 python; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        found=$candidate
        if ! "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            reason="$candidate is $("$candidate" --version 2>&1); 3.11 or newer is needed"
        elif ! "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
            reason="$candidate lacks venv or pip; on Debian and Ubuntu: apt-get install python3-venv"
        else
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    [ -n "$found" ] || fail "no Python found; install Python 3.11 or newer, or set PYTHON to its path"
    fail "$reason (set PYTHON to use another one)"
}

# A hash of the inputs of an environment: the project's metadata, the interpreter and the repository's path.
fingerprint() {
    "$1" -c 'import hashlib, sys
print(hashlib.sha256(open(sys.argv[1], "rb").read() + "\n".join([sys.version, *sys.argv[1:]]).encode()).hexdigest())' \
        "$root/pyproject.toml" "${@:2}"
}

# make_environment DIR REQUIREMENT...: creates an environment with these packages unless it is up to date.
make_environment() {
    local dir=$1 python stamp
    shift
    python=$(find_python)
    stamp=$(fingerprint "$python" "$@")
    build_environment "$dir" "$root/scripts/environment.sh" "$python" "$stamp" "$@"
}

# build_environment DIR LOCK PYTHON STAMP REQUIREMENT...: creates it unless it has this stamp and its Python starts.
# Prints nothing if it is up to date. A lock serializes concurrent scripts.
build_environment() {
    local dir=$1 lock=$2 python=$3 stamp=$4
    shift 4
    if command -v flock >/dev/null 2>&1; then
        exec 9<"$lock"
        flock 9
    fi
    if [ "$(cat "$dir/stamp" 2>/dev/null)" != "$stamp" ] || ! "$dir/bin/python" -c '' 2>/dev/null; then
        printf 'Creating the environment %s with %s ...\n' "$(basename "$dir")" "$("$python" --version)"
        rm -rf "$dir"
        "$python" -m venv "$dir" || fail "could not create the environment $dir"
        printf 'Installing its packages ...\n'
        if ! (cd "$root" && "$dir/bin/python" -m pip install --quiet "$@"); then
            rm -rf "$dir"
            fail "pip could not install $*; see above"
        fi
        printf '%s\n' "$stamp" >"$dir/stamp"
    fi
    exec 9<&-
}

# make_layer DIR BASE REQUIREMENT...: creates an environment with these packages that takes all others from the
# environment BASE, so that torch is not installed again for each MPI library.
make_layer() {
    local dir=$1 base=$2 packages
    shift 2
    make_environment "$dir" --no-deps "$@"
    packages=$(packages_of "$base")
    printf 'import site; site.addsitedir("%s")\n' "$packages" >"$(packages_of "$dir")/base.pth"
}

packages_of() {
    "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

# has ENVIRONMENT MODULE
has() {
    "$1/bin/python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)' "$2" 2>/dev/null
}

# Creates .venv-test: the project and the requirements of its tests; a warning is printed if torch cannot be installed.
make_test_environment() {
    local torch="torch==2.13.0"
    make_environment "$root/.venv-test" --editable ".[test]"
    has "$root/.venv-test" torch && return
    printf 'Installing %s ...\n' "$torch"
    if ! "$root/.venv-test/bin/python" -m pip install --quiet --retries 1 "$torch"; then
        printf '%s\n' '' '*** torch COULD NOT BE INSTALLED: every test that needs it will be SKIPPED. ***' '' >&2
    fi
}

# Chooses and empties the folder of what flaky tests print (scripts/run_tests.py), unless a calling script has done it.
use_flaky_folder() {
    [ -z "${UNICOLL_TEST_FLAKY:-}" ] || return 0
    export UNICOLL_TEST_FLAKY=$root/.flaky
    rm -rf "$UNICOLL_TEST_FLAKY"
}

# Requirements of the tests with other versions of torch, in addition to torch.
TORCH_TESTS=("numpy>=1.24" "pytest>=8" "pytest-xdist>=3" "expecttest>=0.2" "ml_dtypes>=0.3")

# torch_environment SPECIFIER: prints the path of the environment with torch of a version specifier, ==VERSION or <=VERSION.
# It is outside of the checkout, because it has several GB and all checkouts can share it. unicoll is not installed in it;
# tests import the checkout.
torch_environment() {
    local base=${XDG_CACHE_HOME:-${HOME:+$HOME/.cache}} cache python
    cache=${UNICOLL_TEST_CACHE:-${base:+$base/unicoll}}
    if [ -z "$cache" ] || ! mkdir -p "$cache" 2>/dev/null || [ ! -w "$cache" ]; then
        cache=$root/.venv-cache
        mkdir -p "$cache"
    fi
    python=$(find_python)
    "$python" -c 'import hashlib, os, sys, sysconfig
cache, version, *needs = sys.argv[1:]
needs = hashlib.sha256("\n".join(needs).encode()).hexdigest()[:8]
print("{}/torch-{}-{}-{}".format(os.path.abspath(cache), version, sysconfig.get_config_var("SOABI"), needs))' \
        "$cache" "$(sed 's/==//; s/<=/up-to-/' <<<"$1")" "${TORCH_TESTS[@]}"
}

# make_torch_environment SPECIFIER
make_torch_environment() {
    local dir python
    dir=$(torch_environment "$1")
    python=$(find_python)
    : >>"$dir.lock"
    build_environment "$dir" "$dir.lock" "$python" whole "torch$1" "${TORCH_TESTS[@]}"
}
