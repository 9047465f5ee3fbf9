"""Saving: at once, or from a copy in memory while training goes on; with pointers, retention and a full disk's policy.

In the background every rank writes in a thread of its own, and the ranks agree over a group of their own, so that no
exchange of the training is ever mixed up with one of the save.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from echofree import checkpoint, place, retention, space
from echofree.config.schema import CheckpointConfig, OnFull
from echofree.dist import shard
from echofree.dist.watchdog import Pulse
from echofree.dist.world import World
from echofree.errors import SaveFailed
from echofree.stop import StopFlag

log = logging.getLogger("echofree")

POLL_S = 5.0  # while a full disk is waited for
REMIND_S = 300.0  # between two warnings about the same


class Saver:
    """Writes the checkpoints of one run; every rank has one and calls it at the same steps.

    Args:
        root: the run's checkpoint folder.
        rule: what is kept, whether in the background, what a full disk means.
        num_bytes: of a checkpoint that all ranks write in parts.
    """

    def __init__(
        self,
        root: Path,
        run_id: str,
        rule: CheckpointConfig,
        world: World,
        pulse: Pulse,
        stop: StopFlag,
        num_bytes: int = 0,
    ):
        self.root, self.run_id, self.rule, self.world, self.pulse, self.stop = root, run_id, rule, world, pulse, stop
        self.num_bytes = num_bytes
        self.background = rule.async_save
        self._aside = world.twin("save") if self.background else world
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._pool: dict[tuple[Any, ...], torch.Tensor] = {}
        self._stall_s = 0.0
        self._told = self._warned = -REMIND_S  # of waiting, and of what won't fit

    def save(
        self,
        shared: Mapping[str, Any],
        own: Mapping[str, Any],
        about: Mapping[str, Any],
        better: bool,
        parts: Mapping[str, Any] | None = None,
    ) -> Path:
        """-> the folder, which in the background isn't finished yet.

        Args:
            shared, own, about, parts: as in `checkpoint.save`; `about["best_step"]` is that of the best so far.
            better: whether this is the best so far.

        Raises:
            SaveFailed: this save, or the one before in the background, couldn't be written.
        """
        began = time.perf_counter()
        self.finish()
        mine = dict(shared) if self.world.is_first else {}
        num_bytes, num_files = space.size(mine) + space.SLACK_BYTES, len(mine) + self.world.size + space.SLACK_FILES
        if parts is not None:
            num_bytes, num_files = self.num_bytes, num_files + self.world.size
        self._room(self.world, num_bytes, num_files)
        if not self.background:
            self._write(self.world, mine, own, about, better, parts)
        else:
            mine, own = self._copy(mine, ("shared",)), self._copy(dict(own), ("own",))
            parts = self._copy(parts, ("parts",))
            arguments = (self._aside, mine, own, about, better, parts)
            self._thread = threading.Thread(target=self._beside, args=arguments, name="save", daemon=True)
            self._thread.start()
        stall_s = time.perf_counter() - began
        self._stall_s += stall_s
        target = self.root / f"{checkpoint.PREFIX}{about['step']:06d}"
        if self.background:
            log.info("saving %s in the background, training stood for %.3f s", os.path.relpath(target), stall_s)
        return target

    def finish(self) -> None:
        """Waits for the save in the background.

        Raises:
            SaveFailed: it couldn't be written.
        """
        if self._thread is not None:
            while self._thread.is_alive():
                self.pulse.at("save")  # a slow disk isn't a rank that stands
                self._thread.join(1.0)
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def take_stall_s(self) -> float:
        """Seconds that training has stood for saves since the last call."""
        stall_s, self._stall_s = self._stall_s, 0.0
        return stall_s

    def watch(self, num_bytes: int) -> None:
        """While training, on rank 0: a warning when the next save won't fit."""
        if self.world.is_first and time.monotonic() - self._warned > REMIND_S:
            why = space.problem(self.root, num_bytes, space.SLACK_FILES)
            if why:
                self._warned = time.monotonic()
                log.warning("the next checkpoint won't fit: %s. Free some", why)

    def _room(self, world: World, num_bytes: int, num_files: int) -> None:
        """Returns when one more checkpoint fits.

        Raises:
            SaveFailed: it doesn't, and waiting isn't the policy or the run was asked to stop.
        """
        why = world.from_first(space.problem(self.root, num_bytes, num_files) if world.is_first else "")
        began = time.monotonic()
        while why:
            stops = world.sum([float(self.stop.wanted())])[0]
            if self.rule.on_full is OnFull.stop or stops:
                raise SaveFailed(
                    f"no checkpoint could be written: {why}. Earlier checkpoints are untouched. Free some space (or "
                    "lower checkpoint.keep_last) and start again with resume=auto; checkpoint.on_full=wait waits",
                    full=True,
                )
            self._pause(f"waiting for space (checkpoint.on_full=wait): {why}")
            why = world.from_first(space.problem(self.root, num_bytes, num_files) if world.is_first else "")
        if time.monotonic() - began > POLL_S and world.is_first:
            log.info("there is space again after %.0f s", time.monotonic() - began)

    def patient(self, action: Callable[[], None]) -> None:
        """Does `action`, which writes; again and again while the disk is full, if that is the policy.

        Raises:
            OSError: it can't be written, and waiting isn't the policy or the run was asked to stop.
        """
        while True:
            try:
                return action()
            except OSError as error:
                if not place.is_full(error) or self.rule.on_full is OnFull.stop or self.stop.wanted():
                    raise
                self._pause(f"waiting for space (checkpoint.on_full=wait): {error}")

    def _pause(self, text: str) -> None:
        if self.world.is_first and time.monotonic() - self._told > REMIND_S:
            self._told = time.monotonic()
            log.warning("%s", text)
        self.pulse.at("wait for space")
        time.sleep(POLL_S)

    def _write(self, world: World, shared: Any, own: Any, about: Mapping[str, Any], better: bool, parts: Any) -> None:
        """The save itself, the pointers and the retention; again and again when a full disk is waited for."""
        while True:
            try:
                began = time.perf_counter()
                folder = checkpoint.save(self.root, about["step"], shared, own, about, world, parts)
                return self._settle(world, folder, about, better, began)
            except SaveFailed as error:
                stops = world.sum([float(self.stop.wanted())])[0]
                if not error.full or self.rule.on_full is OnFull.stop or stops:
                    raise
                self._pause(f"trying again (checkpoint.on_full=wait): {error}")

    def _settle(self, world: World, folder: Path, about: Mapping[str, Any], better: bool, began: float) -> None:
        """After a save: the pointers and the retention, by rank 0.

        Raises:
            SaveFailed: the file system refused; the checkpoint is there.
        """
        why, full = "", False
        if world.is_first:
            try:
                removed = self._point_and_retain(folder, about, better)
                log.info(
                    "saved %s in %.2f s%s",
                    os.path.relpath(folder),
                    time.perf_counter() - began,
                    f", removed {removed} older" if removed else "",
                )
            except OSError as error:
                why, full = str(error), place.is_full(error)
        why, full = world.from_first((why, full))
        if why:
            raise SaveFailed(
                f"{folder} was written, but not what says that it is the newest, or an older one couldn't be removed: "
                f"{why}. Start again with resume=auto, which looks for the newest complete checkpoint",
                full=full,
            )

    def _point_and_retain(self, folder: Path, about: Mapping[str, Any], better: bool) -> int:
        root = self.root
        checkpoint.point(root, "last", folder)
        if better:
            checkpoint.point(root, "best", folder)
        elif checkpoint.pointed(root, "best") is None:
            best = root / f"{checkpoint.PREFIX}{about['best_step']:06d}"
            checkpoint.point(root, "best", best if best in checkpoint.complete(root) else folder)
        return len(retention.retain(root, self.run_id, self.rule))

    def _beside(self, *arguments: Any) -> None:
        try:
            self._write(*arguments)
        except BaseException as error:
            self._error = error  # raised by the next save, or at the end

    def _copy(self, tree: Any, path: tuple[Any, ...]) -> Any:
        """`tree` with its tensors copied to the host, into the memory of the last copy where it fits: fresh pages cost
        more than the copy."""
        if isinstance(tree, torch.Tensor) and tree.is_meta:
            return tree
        if isinstance(tree, torch.Tensor) and shard.is_sharded(tree):
            return shard.placed(self._copy(shard.local(tree), path), tree)
        if isinstance(tree, torch.Tensor):
            old = self._pool.get(path)
            if old is None or old.shape != tree.shape or old.dtype != tree.dtype:
                pin = tree.device.type == "cuda"
                old = self._pool[path] = torch.empty(tree.shape, dtype=tree.dtype, device="cpu", pin_memory=pin)
            return _copy_into(old, tree.detach())
        if isinstance(tree, Mapping):
            copied = {key: self._copy(value, (*path, key)) for key, value in tree.items()}
            return OrderedDict(copied) if isinstance(tree, OrderedDict) else copied
        if isinstance(tree, (list, tuple)):
            return type(tree)(self._copy(value, (*path, i)) for i, value in enumerate(tree))
        return tree


def _copy_into(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """`target` with the content of `source`. Host memory goes through one plain copy: torch shares out even this among
    its threads, which on a busy machine took five times as long (base, two cores)."""
    if source.device.type != "cpu" or not source.is_contiguous() or source.numel() == 0:
        return target.copy_(source)
    np.copyto(target.reshape(-1).view(torch.uint8).numpy(), source.reshape(-1).view(torch.uint8).numpy())
    return target
