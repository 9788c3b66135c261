"""Grafts on the Hugging Face Hub: a saved graft as a model repository, and a repository as a graft of a store.

The client, its cache, its offline mode and its tokens are those of huggingface-hub, with the same settings (HF_TOKEN,
HF_HUB_CACHE, HF_HUB_OFFLINE, HF_ENDPOINT). Of a repository only the files of a graft are downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, ModelInfo, is_offline_mode
from huggingface_hub.constants import HF_HUB_ETAG_TIMEOUT
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

from taskgraft import __version__
from taskgraft.backbones import api
from taskgraft.backbones.load import Backbone
from taskgraft.errors import GraftError
from taskgraft.grafts import graft as one
from taskgraft.grafts import joint
from taskgraft.grafts.graft import CARD, Graft, add_graft
from taskgraft.grafts.joint import Joint, add_joint
from taskgraft.grafts.store import Store, is_joint, read_either
from taskgraft.names import check_task_name
from taskgraft.reports.cards import card, published

GRAFT, JOINT = (one.RECORD, one.TENSORS), (joint.RECORD, joint.TENSORS)
HARMLESS = {".gitattributes", "LICENSE", CARD}  # what a repository that was made by hand may hold already
TOKEN = "set HF_TOKEN to a token that may use it, or log in with `hf auth login`"


@dataclass(frozen=True)
class Pushed:
    """Where a graft is on the Hub."""

    repo: str
    commit: str
    url: str  # of the commit


@dataclass(frozen=True)
class Pulled:
    """Where a graft is in the store, and the commit that it was."""

    name: str
    version: int
    repo: str
    commit: str


def push(
    path: str | PathLike[str],
    repo: str,
    *,
    private: bool = False,
    message: str | None = None,
    token: str | bool | None = None,
) -> Pushed:
    """Put the graft STORE/NAME, or tasks trained together, into a model repository of the Hub, in one commit.

    The repository is made if there is none, and gets a model card. Where files lay on this machine stays here.
    """
    check_words(repo)
    if not isinstance(path, str | PathLike):
        raise GraftError(f"{path!r} is no saved graft: save it, and give its folder STORE/NAME.")
    if is_offline_mode():
        raise GraftError("HF_HUB_OFFLINE is set, so nothing can be pushed: unset it.")
    place = Path(path)
    folder = Store(place.parent).locate(place.name).folder
    read_either(place.name, folder)
    files = JOINT if is_joint(folder) else GRAFT
    record = {**published(json.loads((folder / files[0]).read_bytes())), "name": place.name}
    with in_words(repo, "try again"):
        hub = client(token)
        repo = hub.create_repo(repo, private=private or None, exist_ok=True).repo_id
        check_repo(hub.model_info(repo, timeout=HF_HUB_ETAG_TIMEOUT), repo, files, private)
        contents = {
            files[0]: json.dumps(record, indent=1, ensure_ascii=False).encode(),
            files[1]: folder / files[1],
            CARD: card(record, repo).encode(),
        }
        additions = [CommitOperationAdd(name, content) for name, content in contents.items()]
        made = hub.create_commit(repo, additions, commit_message=message or f"{place.name} (taskgraft {__version__})")
    return Pushed(repo, made.oid, made.commit_url)


def pull(
    repo: str,
    store: str | PathLike[str] = "grafts",
    *,
    name: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    backbone: Backbone | None = None,
) -> Pulled:
    """Save what a repository of the Hub holds in a store, as the next version of its own or another name.

    `revision` is a branch, a tag or a commit. The graft is known to be whole before the store is touched; with a
    `backbone` without tasks, it is also known to fit it. `local_files_only` (or HF_HUB_OFFLINE) asks the cache alone.
    """
    check_words(repo, revision)
    if name is not None:
        check_task_name(name)
    if not isinstance(store, str | PathLike):
        raise GraftError(f"{store!r} is no store: give a folder.")
    folder = downloaded(repo, revision, token, local_files_only or is_offline_mode())
    what, own_name = whole(repo, folder)
    if backbone is not None:
        check_fit(what, repo, backbone)
    called = own_name if name is None else name
    version = Store(store).put(replace(what, origin={"hub": repo, "commit": folder.name}), called)
    return Pulled(called, version, repo, folder.name)


def check_words(repo: str, revision: str | None = None) -> None:
    """Refuse, before the Hub is asked, what it has no names like."""
    if not isinstance(repo, str) or not repo:
        raise GraftError(f"{repo!r} is no name of a repository: use OWNER/NAME.")
    if revision is not None and (not isinstance(revision, str) or not revision):
        raise GraftError(f"revision {revision!r} is no branch, tag or commit: name one, or leave it out.")


def client(token: str | bool | None) -> HfApi:
    return HfApi(token=token, library_name="taskgraft", library_version=__version__)


def check_repo(info: ModelInfo, repo: str, files: tuple[str, str], private: bool) -> None:
    """Refuse to write over what is no graft, and to publish what was to be private."""
    held = {file.rfilename for file in info.siblings or ()}
    if private and not info.private:
        raise GraftError(f"repository {repo!r} is public already: make it private on its page, or use another one.")
    if files[0] not in held and not held <= HARMLESS:
        raise GraftError(f"repository {repo!r} holds other files than {' and '.join(files)}: push to another one.")


def downloaded(
    repo: str,
    revision: str | None,
    token: str | bool | None,
    offline: bool,
    groups: Sequence[tuple[str, ...]] = (JOINT, GRAFT),
) -> Path:
    """The folder of the cache with the first group of files of which a repository has one; its name is the commit's.

    The Hub is asked first, since the client would give an older commit of its cache where the Hub does not answer.
    """
    advice = "pull it once with the network" if offline else "try again, or from the cache with HF_HUB_OFFLINE=1"
    with in_words(repo, advice, revision, offline):
        hub, files = client(token), [file for group in groups for file in group]
        if not offline:
            info = hub.model_info(repo, revision=revision, timeout=HF_HUB_ETAG_TIMEOUT)
            files = files_in(info, repo, groups)
        options = {"revision": revision, "allow_patterns": files, "local_files_only": offline}
        folder = Path(hub.snapshot_download(repo, **options))
    if not offline and folder.name != info.sha:
        raise GraftError(f"repository {repo!r} changed, or the Hub was lost, while it was pulled: try again.")
    return folder


def files_in(info: ModelInfo, repo: str, groups: Sequence[tuple[str, ...]]) -> list[str]:
    """The files of the first group whose record the repository holds, as far as they are there."""
    held = {file.rfilename for file in info.siblings or ()}
    for files in groups:
        if files[0] in held:
            return [file for file in files if file in held]
    raise GraftError(not_ours(repo, groups))


def not_ours(repo: str, groups: Sequence[tuple[str, ...]] = (JOINT, GRAFT)) -> str:
    records = " and no ".join(files[0] for files in reversed(groups))
    return f"repository {repo!r} has no {records}, so there is nothing to take from it: check its name."


def whole(repo: str, folder: Path) -> tuple[Graft | Joint, str]:
    """What was downloaded, and its own name, once its files are known to be those that were pushed."""
    record = folder / (JOINT if is_joint(folder) else GRAFT)[0]
    if not record.is_file():
        raise GraftError(not_ours(repo))
    try:
        what = read_either(repo, folder)
    except GraftError as error:
        raise GraftError(
            f"{str(error).rstrip('.')}; nothing was stored, and to download it again, delete {folder.parents[1]} first."
        ) from error
    return what, json.loads(record.read_bytes()).get("name") or ""


def check_fit(what: Graft | Joint, repo: str, backbone: Backbone) -> None:
    """Put it on the backbone and take it off again: the fingerprint and all shapes are then known to be right."""
    if getattr(backbone.model, "taskgraft", None) is not None:
        raise GraftError(f"the backbone to check {repo!r} against carries tasks: give one without (tg.load_backbone).")
    if isinstance(what, Joint):
        add_joint(backbone.model, what)
    else:
        add_graft(backbone.model, what, "pulled")
    api.ungraft(backbone.model)


@contextmanager
def in_words(repo: str, advice: str, revision: str | None = None, offline: bool = False) -> Iterator[None]:
    """Whatever the client raises, as one sentence."""
    try:
        yield
    except GraftError:
        raise
    except Exception as error:  # of the network, the Hub, the client and its cache: of many types
        raise GraftError(sentence(error, repo, advice, revision, offline)) from error


def sentence(error: Exception, repo: str, advice: str, revision: str | None, offline: bool) -> str:
    if isinstance(error, HFValidationError):
        return f"{repo!r} is no name of a repository: use OWNER/NAME."
    if isinstance(error, GatedRepoError):
        return f"repository {repo!r} is gated: ask for access on its page, then {TOKEN}."
    if isinstance(error, RepositoryNotFoundError):
        return f"there is no repository {repo!r} on the Hub, or it is private: check its name, or {TOKEN}."
    if isinstance(error, RevisionNotFoundError):
        return f"repository {repo!r} has no revision {revision or 'main'!r}: name one of its branches, tags or commits."
    if status_of(error) in (401, 403):
        return f"the Hub refuses access to repository {repo!r} ({reason(error)}): {TOKEN}."
    if offline:
        at = "" if revision is None else f" at {revision!r}"
        return f"repository {repo!r}{at} is not in the cache, and the Hub is not to be asked: {advice}."
    return f"the Hub could not be used for repository {repo!r} ({reason(error.__cause__ or error)}): {advice}."


def status_of(error: Any) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def reason(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip().rstrip(".:") if lines else type(error).__name__
