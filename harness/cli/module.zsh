_pagetwin_module() {
    if [[ "${words[2]-}" != -m || "${words[3]-}" != harness ]]; then
        _files
        return
    fi
    local IFS=$'\013'
    local completions
    completions=($(IFS="$IFS" COMP_LINE="$BUFFER" COMP_POINT="$CURSOR" _ARGCOMPLETE=3 _ARGCOMPLETE_SHELL=zsh \
        _ARGCOMPLETE_SUPPRESS_SPACE=1 __python_argcomplete_run "${words[1]}" -m harness))
    _describe harness completions -S ''
}
compdef _pagetwin_module python python3
