"""Checkpoints of a run: saved while it trains, found again after any crash, kept as many as are wanted.

save         all ranks: state copied ── one thread writes: files ── marker ── rank 0 deletes what no rule keeps
restore      rank 0: which are complete, newest first ── all ranks: one is read and checked, else the next older
"""

from __future__ import annotations

import contextlib
import operator
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Mapping, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

from bridge.checkpoints.opened import STOCK, open_checkpoint
from bridge.checkpoints.reader import UCVolumeReader
from bridge.checkpoints.retention import Mode, Retention, Saved, list_saved
from bridge.checkpoints.sigterm import Sigterm
from bridge.checkpoints.staging import Staging
from bridge.checkpoints.state import RunState
from bridge.checkpoints.writer import UCVolumeWriter
from bridge.distributed import from_rank_0, on_every_rank, own_group, rank, world_size
from bridge.errors import CheckpointError, CheckpointNotFoundError, CorruptFileError, VolumeError
from bridge.volumes.commit import attempts, begin, complete_attempts, read_marker
from bridge.volumes.hold import delete_unheld, has_marker
from bridge.volumes.storage import Storage
from bridge.volumes.stores import open_storage

_GROUP = "bridge checkpoints"
_SIGNALS = "bridge signals"
_LABEL = "step"
_NICE = 10
# what makes a step unreadable, so that the next older one is tried
_DAMAGE = (CorruptFileError, VolumeError, CheckpointNotFoundError)


@dataclass(frozen=True)
class Restored:
    """What `restore_latest` restored.

    Attributes:
        step: The step that was saved.
        attempt: The folder in the root that it was read from.
        world_size: On how many ranks it was saved.
        values: The parts of the state that have no state of their own, as rank 0 saved them.
        random: What of the random generators is as it was, in words.
        skipped: Newer steps that could not be read, each with the reason.
    """

    step: int
    attempt: str
    world_size: int
    values: dict[str, Any]
    random: str
    skipped: tuple[tuple[int, str], ...] = ()


class CheckpointManager:
    """Saves and restores the state of a training run under a folder, on one process or on all ranks together.

    A state is a dict: models, optimizers, schedulers, a `bridge.DataLoader`, whatever has `state_dict` and
    `load_state_dict`, and values. The random generators of Python, NumPy, torch and CUDA are saved with it, for each
    rank. All ranks call `save`, `should_save` and `restore_latest` together.

    Args:
        root: The folder of the run, on a volume or a disk.
        every: `should_save` asks for a save at each step that is a multiple of this; None: only when told to stop.
        keep_last: How many of the last steps stay, 1 or more.
        keep_every: Steps that are a multiple of this stay as well.
        best: Name of a metric, and "min" or "max": the step that has the best stays as well.
        async_save: Whether `save` returns when the state is copied, and a thread writes it.
        when_busy: What `save` does while the one before is written: "wait" for it, or "skip" this one.
        handle_sigterm: Whether SIGTERM asks for a last save, through `should_save`, instead of ending the process.

    Attributes:
        root: As given.
        should_stop: Whether any rank got SIGTERM, as of the last `should_save`: end the loop when that step is saved.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> manager = bridge.CheckpointManager("/Volumes/main/ml/runs/one", every=1000)  # doctest: +SKIP
        >>> state = {"model": model, "optimizer": optimizer, "loader": loader}  # doctest: +SKIP
        >>> restored = manager.restore_latest(state)  # doctest: +SKIP
        >>> for step, batch in enumerate(loader, start=restored.step + 1 if restored else 0):  # doctest: +SKIP
        ...     train(batch)
        ...     if manager.should_save(step):
        ...         manager.save(step, state)
        ...     if manager.should_stop:
        ...         break
        >>> manager.close()  # doctest: +SKIP
    """

    def __init__(
        self, root: str | os.PathLike[str], *, every: int | None = None, keep_last: int = 3,
        keep_every: int | None = None, best: tuple[str, Mode] | None = None, async_save: bool = True,
        when_busy: Literal["wait", "skip"] = "wait", handle_sigterm: bool = True,
    ) -> None:  # fmt: skip
        for name, number in {"every": every, "keep_last": keep_last, "keep_every": keep_every}.items():
            if number is not None and number < 1:
                raise ValueError(f"{name} is {number}; give 1 or more.")
        if when_busy not in ("wait", "skip"):
            raise ValueError(f'when_busy is {when_busy!r}; give "wait" or "skip".')
        if best is not None and (len(best) != 2 or best[1] not in ("min", "max")):
            raise ValueError(f'best is {best!r}; give the name of a metric and "min" or "max".')
        self.root = os.fspath(root)
        self.should_stop = False
        self._every = every
        self._retention = Retention(keep_last, keep_every, best)
        self._is_async = async_save
        self._when_busy = when_busy
        self._staging = Staging()
        self._threads: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None
        self._is_waited_for = False
        self._protected: set[str] = set()
        self._is_writable = False
        self._sigterm = Sigterm() if handle_sigterm else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(CheckpointError):  # the error that is on its way says more
            self.close()

    def should_save(self, step: int) -> bool:
        """Return whether this step is to be saved: the same on every rank.

        It is, where the step is a multiple of `every`, or any rank got SIGTERM; `should_stop` then says so too. The
        first call sees that there is a root that can be written, so that a run does not end at its first save.

        Raises:
            VolumeError: The root cannot be written; the same on every rank.
        """
        if self._sigterm is not None:
            self._sigterm.catch()
        if not self._is_writable:
            from_rank_0(self._try_to_write, what=f"should_save: may {self.root} be written?")
            self._is_writable = True
        told = self._sigterm is not None and self._sigterm.is_told
        if world_size() > 1:
            flag = torch.tensor(int(told), device="cpu")
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=own_group(_SIGNALS))
            told = bool(flag)
        self.should_stop = self.should_stop or told
        return self.should_stop or (self._every is not None and step % self._every == 0)

    def save(self, step: int, state: Mapping[str, Any], *, metrics: Mapping[str, float] | None = None) -> bool:
        """Save a step; return False where it was skipped, since the one before is still being written.

        After SIGTERM it is not skipped. A step that was saved before is saved again, and until that is complete the
        earlier one is read.

        Args:
            step: 0 or more.
            state: As described above; with `async_save`, what changes after this returns is not saved.
            metrics: What was measured at this step, for `best`.

        Raises:
            CheckpointError: This save, or the one before that nobody waited for, failed; the same on every rank.
            RankError: The ranks do not save the same step to the same root.
            ValueError: `step` is no whole number or negative, or a part has a name that is kept for ranks.
        """
        try:
            number = operator.index(step)
        except TypeError:
            number = -1
        if isinstance(step, bool) or number < 0:
            raise ValueError(f"step is {step}; give a whole number, 0 or more.")
        if self._when_busy == "skip" and not self.should_stop and from_rank_0(self._is_busy, what="save: busy?"):
            return False
        self.wait()

        def copied() -> tuple[dict[str, Any], dict[str, Any]]:
            facts = {"step": number, "metrics": {name: float(value) for name, value in (metrics or {}).items()}}
            # a thread has no default device, and neither has what is saved
            with torch.device("cpu"):
                made = RunState(state).saved()
                return self._staging.stage(made) if self._is_async else made, facts

        try:
            made, facts = on_every_rank(copied, what=f"save of step {number} to {self.root}")
        except BaseException:
            self._staging.give_back()
            raise
        # only now, when all ranks are known to be here: to make a group waits for the others without a word
        group = own_group(_GROUP) if world_size() > 1 else None
        write = partial(self._write, made, facts, group)
        if not self._is_async:
            write()
            return True
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "bridge-checkpoint", _stand_back)
        if not self._is_waited_for:
            # not atexit, before which no pool takes work any more, those that complete a save included
            threading._register_atexit(_finish, weakref.ref(self))  # type: ignore[attr-defined]
            self._is_waited_for = True
        self._running = self._threads.submit(write)
        return True

    def wait(self) -> None:
        """Return when what was begun is complete.

        Raises:
            CheckpointError: It failed; the same on every rank.
        """
        if self._running is not None:
            try:
                self._running.result()
            finally:
                if self._running.done():  # and not where the wait was interrupted
                    self._running = None

    def close(self) -> None:
        """Wait, and give back memory and, in the main thread, the handling of SIGTERM.

        Raises:
            CheckpointError: As in `wait`.
        """
        if self._sigterm is not None:
            self._sigterm.give_back()
        try:
            self.wait()
        finally:
            if self._threads is not None:
                self._threads.shutdown()
                self._threads = None
            self._staging.close()

    def steps(self) -> list[int]:
        """Return the steps that are complete, in order."""
        return sorted({saved.step for saved in list_saved(open_storage(self.root))})

    def restore_latest(self, state: Mapping[str, Any]) -> Restored | None:
        """Restore the newest step that is whole; None where no step was ever completed.

        All ranks read the same. Where a save is damaged, a warning says so and the next older one is restored. On
        another number of ranks than saved it, models and optimizers are spread anew, and data loaders go on at the
        global position. Values go into `state`, if it can be written to, and into the result.

        Raises:
            CheckpointError: Steps are there and none is whole, something else is there and no step, or the state does
                not fit to what was saved: parts are missing on either side, or of another shape or type. The same on
                every rank. Then nothing of the state has changed, unless the message says so.
            RankError: The ranks do not restore from the same root.
            VolumeError: The root cannot be read.
        """
        self.wait()
        found, unmarked, others = from_rank_0(self._found, what=f"restore_latest of {self.root}")
        skipped: list[tuple[int, str]] = []
        for saved in found:
            try:
                with torch.device("cpu"):
                    values = self._restore(saved, state)
            except _DAMAGE as exc:
                skipped.append((saved.step, _reason(exc)))
                continue
            self._protected = {saved.attempt.name}
            skipped += [(step, reason) for step, reason in unmarked if step > saved.step]
            if skipped:
                told = "; ".join(f"step {step} is damaged: {reason}" for step, reason in skipped)
                warnings.warn(f"{self.root}: step {saved.step} was restored, since {told}", stacklevel=2)
            return Restored(
                saved.step, saved.attempt.name, saved.world_size, values, _random(saved), tuple(skipped)
            )  # fmt: skip
        if skipped := [*skipped, *unmarked]:
            listed = "\n  ".join(f"step {step}: {reason}" for step, reason in skipped)
            raise CheckpointError(
                f"no step of {self.root} can be read:\n  {listed}\n  Restore the files, or begin anew in another root."
            )
        if others:
            warnings.warn(f"{self.root}: {others}.", stacklevel=2)
        return None

    def _try_to_write(self) -> None:
        with begin(open_storage(self.root), _LABEL):
            pass

    def _is_busy(self) -> bool:
        return self._running is not None and not self._running.done()

    def _found(self) -> tuple[list[Saved], list[tuple[int, str]], str]:
        """Return the complete saves, steps whose marker is there and not whole, and in words what else there is."""
        storage = open_storage(self.root)
        begun, found = attempts(storage), list_saved(storage)
        if not found and _holds_something_else(storage):
            raise CheckpointError(
                f"{self.root} holds something, and no step of a run: a single checkpoint, an export or a file.\n"
                "  Give the folder that a CheckpointManager saved to, or a new one; bridge.UCVolumeReader loads a "
                "single checkpoint."
            )
        others = f"{len(begun)} saves were begun there, and none was completed" if begun and not found else ""
        complete = {saved.attempt.name for saved in found}
        unmarked = [
            (int(step), "its marker is not whole")
            for attempt in begun
            # read once more: another job's save may have been completed since
            if attempt.name not in complete and (step := attempt.label.removeprefix(_LABEL)).isdecimal()
            and has_marker(storage, attempt.name) and read_marker(storage, attempt.name) is None
        ]  # fmt: skip
        return found, unmarked, others

    def _write(self, state: dict[str, Any], facts: dict[str, Any], group: Any) -> None:
        writer = UCVolumeWriter(self.root, facts=facts, label=f"{_LABEL}{facts['step']}")
        try:
            _save_state_dict(state, writer, group, no_dist=group is None)
        except (CheckpointException, RuntimeError) as exc:
            raise CheckpointError(
                f"step {facts['step']} could not be saved to {self.root}: {_told(exc)}\n"
                "  The steps that were saved before are as they were."
            ) from exc
        finally:
            writer.close()
            self._staging.give_back()
        if rank() == 0:
            self._delete_old()

    def _delete_old(self) -> None:
        """Delete what no rule keeps; the save itself stands whether or not that works."""
        try:
            storage = open_storage(self.root)
            saved = list_saved(storage)
            doomed = self._retention.doomed(saved, self._protected)
            _, failed = delete_unheld(storage, [one.attempt for one in doomed], at_once=True)
            problems = [f"an old checkpoint stays: {told}" for told in failed.values()]
            problems += self._retention.why_no_best(saved)
        except OSError as exc:
            problems = [f"an old checkpoint stays: {exc}"]
        for problem in problems:
            with contextlib.suppress(UserWarning):  # where warnings are errors, rank 0 would be alone with it
                warnings.warn(problem, stacklevel=2)

    def _restore(self, saved: Saved, state: Mapping[str, Any]) -> dict[str, Any]:
        """Restore a save, and return its values.

        Raises:
            CorruptFileError: Or VolumeError, or CheckpointNotFoundError: it is damaged.
            CheckpointError: The state does not fit to it, or a rank was lost.
        """
        group = own_group(_GROUP) if world_size() > 1 else None
        path = f"{self.root.rstrip('/')}/{saved.attempt.name}"
        what = f"step {saved.step} of {self.root} cannot be loaded"
        run = RunState(state)

        def wanted() -> dict[str, Any]:
            opened = open_checkpoint(path)
            if opened.index is None:
                raise CorruptFileError(f"{path} has no index any more.")
            return run.wanted(opened.index, saved.world_size)

        def load() -> dict[str, Any]:
            return run.load(chosen, step=saved.step, saved_world_size=saved.world_size)

        try:
            chosen = on_every_rank(wanted, what=f"plan of {path}")
            _load_state_dict(chosen, UCVolumeReader(path), group, no_dist=group is None)
        except BaseException as exc:
            run.undo()
            if isinstance(exc, CheckpointException):
                if all(isinstance(reason, _DAMAGE) for reason, _ in exc.failures.values()):
                    # what was found when it was read once more, to fill tensors
                    is_late = exc.args[0] == "read"
                    raise CorruptFileError(_told(exc) + "; parts of the state have changed" * is_late) from exc
                raise CheckpointError(f"{what}: {_told(exc)}") from exc
            if isinstance(exc, RuntimeError) and not isinstance(exc, _DAMAGE):
                raise CheckpointError(f"{what}: {_told(exc)}") from exc
            raise
        values = on_every_rank(load, what=f"load of {path}")
        if isinstance(state, MutableMapping):
            state.update({name: value for name, value in values.items() if name in run.values})
        return values


def _stand_back() -> None:
    """Let training have the processor first, where threads have a priority of their own, as those of Linux have."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _holds_something_else(storage: Storage) -> bool:
    folder = storage.folder
    if folder is not None and (folder.is_file() or (folder / STOCK).is_file()):
        return True
    return read_marker(storage) is not None or next(complete_attempts(storage), None) is not None


def _random(saved: Saved) -> str:
    if saved.world_size == world_size():
        return "as it was on every rank"
    if saved.world_size > world_size():
        return f"as it was on ranks 0 to {world_size() - 1} of {saved.world_size}"
    return f"as it was on ranks 0 to {saved.world_size - 1}; seeded anew on the others"


def _told(exc: BaseException) -> str:
    """Return why ranks failed, each reason once."""
    if isinstance(exc, CheckpointError):
        return str(exc)
    if not isinstance(exc, CheckpointException):
        return f"a rank was lost: {exc}"
    reasons: dict[str, list[int]] = {}
    for number, (reason, _) in sorted(exc.failures.items()):
        is_told = isinstance(reason, CheckpointError | CorruptFileError | VolumeError)
        text = str(reason).partition("\n")[0].rstrip(".") if is_told else f"{type(reason).__name__}: {reason}"
        reasons.setdefault(text, []).append(number)
    if world_size() == 1:
        return "; ".join(reasons)
    return "; ".join(f"rank {', '.join(map(str, numbers))}: {text}" for text, numbers in reasons.items())


def _reason(exc: Exception) -> str:
    """Return the first line of an error, and of which rank it is."""
    text = str(exc).partition("\n")[0].rstrip(".")
    return f"{text} ({notes[0].rstrip('.')})" if (notes := getattr(exc, "__notes__", [])) else text


def _finish(reference: weakref.ref[CheckpointManager]) -> None:
    """Wait for a save when the interpreter ends, and tell where it failed and nobody waited for it."""
    manager = reference()
    if manager is not None and manager._running is not None and (error := manager._running.exception()) is not None:
        warnings.warn(f"a save failed, and nobody waited for it: {error}", stacklevel=1)
