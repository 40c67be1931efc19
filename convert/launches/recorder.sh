# Read by bash before a script (BASH_ENV): no program is there, so each command but bash's own comes to the handler.
# What a command prints is not known: a marker stands for it, unless the user has given it. That is the command between
# the bytes 1 and 2, with the byte 3 for blanks, at which bash would take it apart.
command_not_found_handle() {
    case "$*" in
__ANSWERS__
    *) local IFS=$'\3' ; printf '\1%s\2' "$*" ;;
    esac
}
# Programs that only work on texts, as far as scripts use them.
dirname() {
    local path=${1%/}
    case $path in */*) path=${path%/*}; printf '%s\n' "${path:-/}" ;; *) printf '.\n' ;; esac
}
basename() {
    local path=${1%/}
    path=${path##*/}
    printf '%s\n' "${path%"${2-}"}"
}
realpath() {
    case $1 in /*) printf '%s\n' "${1%/}" ;; .) printf '%s\n' "$PWD" ;; *) printf '%s\n' "$PWD/${1#./}" ;; esac
}
seq() {
    local from=1 step=1 to=$1 i
    if (($# == 2)); then from=$1 to=$2; fi
    if (($# == 3)); then from=$1 step=$2 to=$3; fi
    for ((i = from; step > 0 ? i <= to : i >= to; i += step)); do printf '%s\n' "$i"; done
}
cat() {
    local line file
    for file in "${@:-/dev/stdin}"; do
        while IFS= read -r line || [[ -n $line ]]; do printf '%s\n' "$line"; done <"$file"
    done
}
bash() { /bin/bash "$@"; }
sh() { /bin/bash "$@"; }
# Before each command: what a script may have turned off, and values that the user has given.
trap __TRAP__ DEBUG
PS4=$'\x1e''$BASHPID:${LINENO}'$'\x1f'
set -uxT
