"""One conversation: its KV cache, its position, its token history."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bessemer.arguments import checked_path, checked_whole, shown
from bessemer.errors import ContextLengthError, GenerationError, UsageError
from bessemer.runtime.engine import Engine
from bessemer.runtime.interrupt import StepCancelled, call_interruptibly
from bessemer.runtime.library import STATUS_OK, Context, Memref1, Memref2
from bessemer.runtime.memory import allocate
from bessemer.runtime.state import Held, filled, mutated_states, usable
from bessemer.runtime.token_ids import checked_ids
from bessemer.steering import DIRECTIONS, SCALES, Steering

F32Array = npt.NDArray[np.float32]


class Session:
    """A conversation with a model.

    Feeding tokens moves `position` on; logits are those of the token after. A call that raises,
    KeyboardInterrupt included, leaves the session as it was before. A session serves one call at a
    time (a second one raises UsageError); sessions of one model may run in several threads.
    """

    def __init__(self, engine: Engine) -> None:
        """An empty session. Its memory is zero pages until tokens come."""
        self._engine = engine
        manifest = engine.manifest
        self._layout = manifest.state
        self._rope = manifest.rope
        self._held = Held()
        self._lock = threading.Lock()
        self._cancelled = False
        self._tokens = np.zeros(self._layout.capacity, np.int64)

        self._state = allocate(self._layout.nbytes)
        header = self._layout.header()
        self._state[: header.nbytes] = header.view(np.uint8)
        self._scratch = allocate(manifest.scratch.nbytes(engine.threads))
        chunk = self._layout.chunk
        self._slots = np.zeros(chunk, np.int64)
        self._numbers = np.arange(max(self._layout.capacity, chunk))
        self._logits = np.zeros((1, manifest.vocab_size), np.float32)

        # Made once, and a step only turns pointers: whatever Python touches between two decode
        # steps has left the caches meanwhile, and costs several times of what it would alone.
        self._one_row = Memref2.over(self._logits)
        self._context = Context(pool=engine.pool.handle, threads=engine.threads)
        self._ids, self._positions = _memref(self._tokens), _memref(self._numbers)
        self._one_slot_each, self._output_rows = _memref(self._slots), _memref(self._numbers)
        self._memrefs = [
            _memref(engine.weights),
            self._ids,
            self._positions,
            self._one_slot_each,
            self._output_rows,
            _memref(self._state),
            _memref(self._scratch),
        ]
        self._arguments = [ctypes.addressof(self._context)]
        self._arguments += [ctypes.addressof(m) for m in self._memrefs]

    # -- what is held --------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """How many tokens are held."""
        return self._held.position

    @property
    def capacity(self) -> int:
        """The context length in tokens."""
        return self._layout.capacity

    @property
    def could_be_larger(self) -> bool:
        """Whether the model's configuration leaves room for a larger context."""
        from bessemer.importer.architectures import check_stated_context

        try:
            check_stated_context(self._engine.manifest.config, self.capacity + 1)
        except UsageError:
            return False
        return True

    @property
    def vocab_size(self) -> int:
        """The width of logits."""
        return self._engine.manifest.vocab_size

    @property
    def tokens(self) -> list[int]:
        """The ids that are held, oldest first."""
        return self._tokens[: self._held.position].tolist()

    # -- feeding -------------------------------------------------------------------------------

    def prefill(self, ids: Sequence[int] | np.ndarray, *, all_logits: bool = False) -> F32Array:
        """Feed `ids` (at least one), in chunks, at the current position.

        Returns the logits after the last one, float32 [vocab], or with `all_logits` after each,
        [len(ids), vocab]; a copy.
        Raises UsageError for ids that the model doesn't have, ContextLengthError when they don't
        fit, GenerationError when the model computes NaN, StepCancelled after `cancel()`.
        """
        new = self._checked(ids)
        with self._alone():
            self._check_room(len(new))
            out = np.empty((len(new) if all_logits else 1, self.vocab_size), np.float32)
            self._feed(new, out)
        return out if all_logits else out[0]

    def decode(self, token: int) -> F32Array:
        """Feed one token; returns the logits after it, float32 [vocab], a copy.

        Errors as for `prefill`.
        """
        if type(token) is not int or not 0 <= token < self.vocab_size:
            token = self._checked_token(token)
        with self._alone():
            self._check_room(1)
            held = self._held
            end = held.position + 1
            regime = self._regime(end)
            if usable(self._layout, held, held.position, regime) != held.position:
                self._feed(np.array([token]), self._logits)
            else:
                self._tokens[held.position] = token
                high_water = self._begin(held.position, end, regime)
                self._step(self._engine.library.decode, held.position, end, self._logits)
                self._held = Held(end, end, high_water, regime)
            return self._logits[0].copy()

    def cancel(self) -> None:
        """Stop the call that is running now, from another thread: it raises StepCancelled within
        one step. Without a running call nothing happens.
        """
        self._cancelled = True
        self._context.cancel = 1

    def _feed(self, new: npt.NDArray[np.int64], out: F32Array) -> None:
        """Feed `new`, and before it whatever of the history must be fed again. A single token
        whose logits are wanted is a decode step.

        out: logits of the last token [1, vocab], or of all new ones [len(new), vocab].
        """
        held = self._held
        end = held.position + len(new)
        regime = self._regime(end)
        at = usable(self._layout, held, held.position, regime)
        self._tokens[held.position : end] = new
        high_water = self._begin(at, end, regime)
        first_row = end - len(out)
        while at < end:
            stop = min(at + self._layout.chunk, end)
            rows = max(0, stop - max(at, first_row))
            done = max(at, first_row) - first_row
            self._step(self._entry(stop - at, rows), at, stop, out[done : done + rows])
            at = stop
        self._held = Held(end, end, high_water, regime)

    def _entry(self, count: int, rows: int) -> ctypes._NamedFuncPointer:
        """The entry point for `count` tokens of which the last `rows` give logits."""
        library = self._engine.library
        return library.decode if count == rows == 1 else library.prefill

    def _begin(self, start: int, end: int, regime: int) -> int:
        """Note that the positions [start, end) are going to be overwritten; returns the new high
        water. Whatever interrupts them, the session knows what its memory is still good for.
        """
        held = self._held
        self._cancelled = False  # a cancel before now was for nothing that runs
        if start == 0:
            for buffer in mutated_states(self._layout, self._state):
                buffer.fill(0)
        high_water = max(held.high_water, end) if start else end
        valid = 0 if self._layout.mutates else min(start, held.position)
        self._held = Held(held.position, valid, high_water, regime)
        self._context.sequence_length = end
        return high_water

    def _regime(self, length: int) -> int:
        return 0 if self._rope is None else self._rope.regime(length)

    def _step(
        self, function: ctypes._NamedFuncPointer, start: int, end: int, out: F32Array
    ) -> None:
        """One native call: the tokens of positions [start, end), of which the last len(out) give
        logits.
        """
        count, rows = end - start, len(out)
        self._ids.show(start, count)
        self._positions.show(start, count)
        self._one_slot_each.show(0, count)
        self._output_rows.show(count - rows, rows)
        self._call(function, self._one_row if out is self._logits else Memref2.over(out))
        if rows and math.isnan(out.max()):
            raise GenerationError(
                f"the model computed NaN at position {end - 1}: its weights or its precision are "
                "at fault; try --weights f32 --kv f32, and check the checkpoint"
            )

    def _call(self, function: ctypes._NamedFuncPointer, logits: Memref2) -> None:
        arguments = (*self._arguments, ctypes.addressof(logits))
        context = self._context
        while True:
            # In this order: a cancel between the two lines is seen by the second one.
            context.cancel = 0
            if self._cancelled:
                raise StepCancelled("the call was cancelled")
            call_interruptibly(context, function, arguments)
            if context.status == STATUS_OK:
                return
            # Cancelled by a signal, for which Python raises KeyboardInterrupt about here, or by
            # `cancel`, or by a signal whose handler chose to go on: then the step is run again.

    # -- moving back, copying, keeping ---------------------------------------------------------

    def rewind(self, n: int) -> None:
        """Keep the first `n` tokens and forget the rest.

        Logits come by feeding the next token, or by rewinding one further and feeding the last
        kept one again. What the memory has lost of the kept tokens (sliding windows) is computed
        again from the history with the next call.
        """
        count = checked_whole("the number of tokens to keep", n)
        with self._alone():
            held = self._held
            if count > held.position:
                raise UsageError(f"rewind to {count}: the session holds {held.position} tokens")
            if count < held.position:
                self._held = replace(held, position=count, valid=min(held.valid, count))

    def steer(
        self, directions: np.ndarray | None, *, attention: float = 0.0, ffn: float = 0.0
    ) -> None:
        """Move the sublayers' outputs along directions from now on, see `bessemer.steering`; with
        None no longer. What is held is computed again with the next call.

        directions: float32 [layers, hidden].  attention, ffn: scales for the two kinds of sublayer.
        Raises UsageError when the model was compiled without steering, or they don't fit it.
        """
        with self._alone():
            given = self._steering_states()
            if directions is None:
                values = [np.zeros_like(state) for state in given]
            else:
                steering = Steering(np.asarray(directions, np.float32), attention, ffn)
                steering.check(*given[0].shape)
                values = [steering.directions, steering.scales]
            if all(np.array_equal(a, b) for a, b in zip(given, values, strict=True)):
                return
            self._held = replace(self._held, valid=0)
            for state, value in zip(given, values, strict=True):
                state[...] = value

    def _steering_states(self) -> list[F32Array]:
        """Directions [layers, hidden] and scales [2], in the state memory."""
        states = {state.name: state for state in self._layout.named}
        offsets = self._layout.named_offsets()
        if not {DIRECTIONS, SCALES} <= states.keys():
            raise UsageError(
                f"{self._engine.manifest.name} was compiled without steering; compile it with "
                "--steering (steering=True)"
            )
        found = []
        for name in (DIRECTIONS, SCALES):
            held = self._state[offsets[name] :][: states[name].nbytes]
            found.append(held.view(np.float32).reshape(states[name].shape))
        return found

    def fork(self) -> Session:
        """A copy that goes its own way from here; it costs memory for what is held."""
        with self._alone():
            other = Session(self._engine)
            held = self._held
            other._tokens[: held.position] = self._tokens[: held.position]
            for there, here in zip(other._parts(held), self._parts(held), strict=True):
                there[...] = here
            other._held = held
        return other

    def save(self, path: str | Path) -> None:
        """Write the session to a file, whole or not at all.

        A symbolic link stays, and the file that it leads to is written. Raises UsageError where it
        can't be, for what exists and is no regular file (a folder, a pipe, a device), and for a
        file of the model itself.
        """
        from bessemer.runtime.session_file import check_no_model_file, write_session

        file = checked_path("the file of a session", path)
        check_no_model_file(file, self._engine.library.path.parent, self._engine.manifest)
        with self._alone():
            held = self._held
            parts = self._parts(held)
            write_session(file, self._engine.manifest, held, self._tokens, parts)

    def load(self, path: str | Path) -> None:
        """Replace what is held by a session that `save` wrote.

        Raises UsageError when the file is damaged or comes from another model; the session is
        then as it was.
        """
        from bessemer.runtime.session_file import read_session

        file = checked_path("the file of a session", path)
        with self._alone(), read_session(file, self._engine.manifest) as stored:
            parts = list(self._parts(stored.held))
            stored.expect(sum(part.size for part in parts))
            self._held = Held()
            for part in parts:
                stored.take(part)
            self._tokens[: len(stored.tokens)] = stored.tokens
            self._held = stored.held

    def _parts(self, held: Held) -> Iterator[npt.NDArray[np.uint8]]:
        """The state memory that stands for what is held."""
        return filled(self._layout, self._state, held.high_water if held.valid else 0)

    # -- checks --------------------------------------------------------------------------------

    def _alone(self) -> threading.Lock:
        """The lock to hold for one call; UsageError while another call holds it.

        A bare lock, since `with` takes it without a moment between at which a Ctrl-C could leave
        it taken.
        """
        if self._lock.locked():
            raise UsageError(
                "the session is in use by another call; give each thread a session of its own"
            )
        return self._lock

    def _checked(self, ids: Sequence[int] | np.ndarray) -> npt.NDArray[np.int64]:
        """The ids as an array; UsageError unless all are ids of the model."""
        return checked_ids(ids, self.vocab_size)

    def _checked_token(self, token: int) -> int:
        """One id of the model, whatever kind of integer it is; UsageError for anything else."""
        if not isinstance(token, (int, np.integer)) and np.ndim(token) != 0:
            raise UsageError(f"the token is {shown(token)}; decode takes one id, prefill several")
        return int(self._checked([token])[0])

    def _check_room(self, count: int) -> None:
        wanted = self._held.position + count
        if wanted > self.capacity:
            raise ContextLengthError(
                f"{count} more tokens after {self._held.position} make {wanted}, and the context "
                f"holds {self.capacity}; shorten the text, rewind, or compile with a larger "
                "--context"
            )


def _memref(array: np.ndarray) -> Memref1:
    return Memref1.at(array.ctypes.data, array.size)
