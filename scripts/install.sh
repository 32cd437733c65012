#!/bin/sh
# Installs into a virtual environment: `scripts/install.sh PYTHON [arguments of pip install]`.
# By uv where it can be had: it takes seconds where pip takes minutes. uv does not read pip's configuration, so the
# indexes, folders, constraints and certificate that pip would use are passed on. Where uv fails, pip is asked. Bytecode is
# left to the first import: compiling that of all packages takes longer than all the rest.
set -eu
python=$1
shift

by_pip() {
    "$python" -m pip install --quiet --disable-pip-version-check "$@"
}

# What pip's environment or files give to an option; empty without it. Several values are on one line.
configured() {
    "$python" -m pip config list 2>/dev/null | sed 's/\\n/ /g' |
        sed -n "s/^\(:env:\|install\|global\)\.$1='\(.*\)'\$/\2/p" | head -n 1
}

by_uv() {
    uv=$(dirname "$python")/uv
    [ -x "$uv" ] || by_pip uv || return
    set -- "$@" --python "$python" --quiet --index-strategy unsafe-best-match
    for value in $(configured index-url); do set -- "$@" --default-index "$value"; done
    for value in $(configured extra-index-url); do set -- "$@" --index "$value"; done
    for value in $(configured find-links); do set -- "$@" --find-links "$value"; done
    for value in $(configured constraint); do set -- "$@" --constraint "$value"; done
    if [ -n "$(configured no-index)" ]; then set -- "$@" --no-index; fi
    certificate=$(configured cert)
    [ -z "$certificate" ] || [ -n "${SSL_CERT_FILE:-}" ] || export SSL_CERT_FILE="$certificate"
    "$uv" pip install "$@"
}

by_uv "$@" || {
    echo "scripts/install.sh: pip installs, since uv does not" >&2
    by_pip "$@"
}
