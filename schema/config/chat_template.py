"""The job's own chat template: the file that the configuration names, and the text that a run keeps of it.

    custom_chat_template_path ── preparation of the data ─▶ <run_dir>/data/chat_template.jinja
                                                             └─▶ each checkpoint ─▶ its exports

People edit the file while a run goes on. Prompts are as they were prepared, so whatever comes later reads the text
that is kept.
"""

from __future__ import annotations

from pathlib import Path

from schema.config.paths import home_hint, read_regular
from schema.config.problem import Problem
from schema.config.root import Config
from schema.util.atomic_file import write_text

FILE = "chat_template.jinja"
KEY = "rollout.multi_turn_config.custom_chat_template_path"
_MOST_BYTES = 1024 * 1024
"""The longest templates of the hub have some tens of kilobytes."""


class TemplateError(ValueError):
    """A template cannot be read; it has the problem with its remedy."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.render())
        self.problem = problem


def read_template(config: Config) -> str | None:
    """The text of the file that the configuration names; None: it names none. Raises `TemplateError`."""
    name = config.rollout.multi_turn_config.custom_chat_template_path
    if not name:
        return None
    try:
        return read_regular(Path(name), _MOST_BYTES).decode("utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        hint = home_hint(name) or "name a text file in Jinja's language, relative to the current directory"
        message = f"the chat template {name} cannot be read: {why}"
        raise TemplateError(Problem(KEY, message, name, hint)) from error


def kept_in(run_dir: Path) -> Path:
    """Where a run keeps the template that its data were prepared with, if it has one of its own."""
    return run_dir / "data" / FILE


def kept_template(run_dir: Path) -> str | None:
    """The text that a run keeps; None: it has none of its own. Raises OSError, UnicodeDecodeError."""
    path = kept_in(run_dir)
    return path.read_bytes().decode("utf-8") if path.exists() else None


def keep_template(run_dir: Path, template: str | None) -> None:
    """Keep the text that the data are prepared with; None: none. Raises OSError."""
    path = kept_in(run_dir)
    if template is None:
        path.unlink(missing_ok=True)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, template)


def changed_since(config: Config, run_dir: Path) -> str:
    """A warning if the file has changed since a run's data were prepared, which are used again; "": it has not."""
    try:
        if read_template(config) == kept_template(run_dir):
            return ""
        change = "has changed"
    except (OSError, ValueError):
        change = "cannot be read any more"
    return (
        f"{KEY}: the file {change} since the data of this run were prepared: the run, its checkpoints and exports go "
        f"on with the template in {kept_in(run_dir)}; begin another run to train with another"
    )
