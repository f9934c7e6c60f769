_pagetwin_module() {
    [[ "${COMP_WORDS[1]-}" == -m && "${COMP_WORDS[2]-}" == harness ]] || return
    local IFS=$'\013'
    COMPREPLY=($(IFS="$IFS" COMP_LINE="$COMP_LINE" COMP_POINT="$COMP_POINT" COMP_TYPE="$COMP_TYPE" \
        _ARGCOMPLETE_COMP_WORDBREAKS="$COMP_WORDBREAKS" _ARGCOMPLETE=3 _ARGCOMPLETE_SHELL=bash \
        _ARGCOMPLETE_SUPPRESS_SPACE=1 __python_argcomplete_run "$1" -m harness))
    [[ "${COMPREPLY-}" =~ [=/:,.]$ ]] || compopt +o nospace
}
complete -o nospace -o default -o bashdefault -F _pagetwin_module python python3
