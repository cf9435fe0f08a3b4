"""Shell completion: commands, parameter names after `-p` and `-r`, files elsewhere.

The script holds the words themselves, so that completing never starts Python.
"""

from __future__ import annotations

from collections.abc import Sequence

from dflash_lab.stages import STAGES, params_class


def script(shell: str, commands: Sequence[str]) -> str:
    """Return the completion script for bash, zsh or fish."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](" ".join(commands))


def _names() -> dict[str, str]:
    return {stage: " ".join(sorted(params_class(stage).model_fields)) for stage in STAGES}


def _bash(commands: str) -> str:
    cases = "\n".join(f"        {stage}) names='{names}' ;;" for stage, names in _names().items())
    return f"""\
_dflash_lab() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" names=''
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    if [ "$COMP_CWORD" = 1 ]; then
        COMPREPLY=($(compgen -W '{commands}' -- "$word"))
    elif [ "$before" = -p ] || [ "$before" = -r ]; then
        COMPREPLY=($(compgen -W "$names" -- "$word"))
    elif [[ "$word" == -* ]]; then
        COMPREPLY=($(compgen -W '--run -p -r -f -y -b --help' -- "$word"))
    else
        COMPREPLY=($(compgen -f -- "$word"))
    fi
}}
complete -o filenames -F _dflash_lab dflash-lab
"""


def _zsh(commands: str) -> str:
    return "autoload -U +X bashcompinit && bashcompinit\n" + _bash(commands)


def _fish(commands: str) -> str:
    lines = [f"complete -c dflash-lab -n __fish_use_subcommand -f -a '{commands}'"]
    for stage, names in _names().items():
        lines.append(f"complete -c dflash-lab -n '__fish_seen_subcommand_from {stage}' -s p -x -a '{names}'")
    return "\n".join(lines) + "\n"
