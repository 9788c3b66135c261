"""The command line."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """One frozen Transformer, any number of tasks: each a graft of a few percent of its weights."""


@app.command()
def demo() -> None:
    """Graft two tasks onto the embedded default backbone, run a mixed batch, and show what holds."""
    from taskgraft.demo import run
    from taskgraft.errors import GraftError

    try:
        run(typer.echo)
    except GraftError as error:
        typer.echo(f"taskgraft: {error}", err=True)
        raise typer.Exit(2) from error


if __name__ == "__main__":
    app()
