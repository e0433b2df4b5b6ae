"""The commands and their options are pinned, so that a new one is a deliberate decision."""

import typer

from fullshard.cli.app import app


def options_of(command, context):
    names = {
        name
        for param in command.get_params(context)
        for name in (*param.opts, *param.secondary_opts)
    }
    return sorted(name for name in names if name.startswith("-"))


def surface():
    found: dict[str, list[str]] = {}

    def visit(command, path):
        context = command.make_context(
            " ".join(path) or "fullshard", ["--help"], resilient_parsing=True
        )
        found[" ".join(path)] = options_of(command, context)
        for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
            visit(command.get_command(context, name), (*path, name))

    visit(typer.main.get_command(app), ())
    return found


def test_commands_and_options_are_exactly_these(snapshot):
    lines = (" ".join((f"fullshard {path}:", *options)) for path, options in surface().items())
    assert "\n".join(lines) == snapshot
