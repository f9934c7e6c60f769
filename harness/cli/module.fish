function __pagetwin_module
    set -lx _ARGCOMPLETE 3
    set -lx _ARGCOMPLETE_DFS \t
    set -lx _ARGCOMPLETE_IFS \n
    set -lx _ARGCOMPLETE_SUPPRESS_SPACE 1
    set -lx _ARGCOMPLETE_SHELL fish
    set -lx COMP_LINE (commandline -p)
    set -lx COMP_POINT (string length (commandline -cp))
    set -l words (commandline -opc)
    $words[1] -m harness 8>&1 9>&2 1>/dev/null 2>&1
end
function __pagetwin_is_module
    set -l words (commandline -opc)
    test "$words[2]" = -m -a "$words[3]" = harness
end
complete -c python -c python3 -n __pagetwin_is_module -f -a '(__pagetwin_module)'
