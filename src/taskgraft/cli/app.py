"""How every command speaks, fails and ends."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from taskgraft import __version__
from taskgraft.errors import GraftError, Stopped

BAD_INPUT, STOPPED, UNEXPECTED = 2, 130, 1
WIDE = 160  # columns of a table that goes to a file or a pipe
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")  # what launchers tell a process of its number


def process_number() -> int:
    """Which of the processes that `accelerate launch` or torchrun started this is; 0 is the one that speaks."""
    return next((int(os.environ[name]) for name in RANKS if name in os.environ), 0)


class Output:
    """What a command says: to people on stdout, or on stderr where stdout is for a program (`--json`)."""

    def __init__(self, json: bool) -> None:
        self.json = json
        self.silent = process_number() > 0

    def say(self, what: object = "") -> None:
        """A line, or a table of rich."""
        if self.silent:
            return
        stream = sys.stderr if self.json else sys.stdout
        if isinstance(what, str):
            coding = stream.encoding or "ascii"  # a terminal that cannot show a label still gets the rest
            print(what.encode(coding, "backslashreplace").decode(coding), file=stream, flush=True)
            return
        from rich.console import Console

        Console(file=stream, width=None if stream.isatty() else WIDE).print(what)

    def finish(self, record: dict[str, Any]) -> None:
        """The command's result as the last line of stdout, if it was asked for."""
        if self.json and not self.silent:
            print_json(record)


def print_json(record: dict[str, Any]) -> None:
    """One object on one line of stdout, escaped only where stdout could not take it otherwise."""
    line = json.dumps(record, ensure_ascii=False)
    try:
        line.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        line = json.dumps(record)
    print(line)


class Shell(TyperGroup):
    """The group of all commands: whatever goes wrong in one becomes a sentence on stderr and an exit code."""

    def main(
        self, args: Sequence[str] | None = None, prog_name: str | None = None, *others: Any, **options: Any
    ) -> Any:
        words = sys.argv[1:] if args is None else list(args)
        code, sentence = self.run(words, options)
        if sentence is not None:
            number = process_number()
            print(f"taskgraft{f' (process {number})' if number else ''}: {sentence}", file=sys.stderr)
            if not number and "--json" in words[: words.index("--") if "--" in words else None]:
                print_json({"error": sentence})
        sys.exit(code)

    def run(self, words: list[str], options: dict[str, Any]) -> tuple[int, str | None]:
        """The exit code, and what to say of it."""
        try:
            code = super().main(words, "taskgraft", **{**options, "standalone_mode": False})
        except GraftError as error:
            return STOPPED if isinstance(error, Stopped) else BAD_INPUT, str(error)
        except (KeyboardInterrupt, typer.Abort):
            code = STOPPED
        except OSError as error:
            return UNEXPECTED, str(error)
        except Exception as error:
            if hasattr(error, "format_message"):  # Typer's own: the words could not be read as a command
                context = getattr(error, "ctx", None)
                known = "" if context is None else f" See {context.command_path} --help."
                return BAD_INPUT, f"{error.format_message().rstrip('.')}.{known}"
            traceback.print_exc()
            return UNEXPECTED, f"{type(error).__name__}: {error}"
        return (STOPPED, "stopped.") if code == STOPPED else (code or 0, None)


app = typer.Typer(
    cls=Shell,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["--help", "-h"]},
)


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"taskgraft {__version__}")
        raise typer.Exit


@app.callback(
    invoke_without_command=True,
    epilog="""From a file to answers:
  taskgraft train train.csv --text tweet --label belief --name warming
  taskgraft predict warming "it is getting hotter"

Every command takes --json: its last line on stdout is then one JSON object.
Exit codes: 0 done; 2 wrong input, and a sentence says which; 130 stopped; 1 anything else.""",
)
def main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """One frozen Transformer, any number of tasks: each a graft of a few percent of its weights."""
    processes = os.environ.get("WORLD_SIZE", "1")
    if context.invoked_subcommand not in ("train", None) and int(processes) > 1:
        raise GraftError(
            f"`taskgraft {context.invoked_subcommand}` runs in one process, and {processes} were started: "
            "`accelerate launch` and torchrun are for `taskgraft train`."
        )
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(BAD_INPUT)
