"""What an overlay showed at two boundaries of its layer, path by path.

The layer's history knows the layer alone. A path showed what the layer had there; and
where it had nothing, what the past has, unless a note hid it. Notes are files of the layer, so that its
history also tells which of them were there at which of the two boundaries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from treenail.workspace.base import FilesystemSnapshot
from treenail.workspace.diffs import Version
from treenail.workspace.isolated.changes import version_of
from treenail.workspace.isolated.notes import Note, is_hidden, is_hiding, is_note, own_paths, parse
from treenail.workspace.isolated.overlay import Overlay
from treenail.workspace.manifest import State


def differences(
    overlay: Overlay, before: FilesystemSnapshot, after: FilesystemSnapshot | None
) -> Iterator[tuple[str, Version | None, Version | None]]:
    """Yield each path that may differ between two boundaries, or between one and now, as it was and is."""
    with overlay.layer.undo.lock:
        states = overlay.layer.undo.states_between(before, after)
        notes = _notes(overlay, states)
        paths = {*own_paths(states), *notes}
        for path, (old_note, new_note) in notes.items():
            if is_hiding(old_note) != is_hiding(new_note):
                # What the past has below it came or went with the note.
                paths.update(overlay.past.below(path))
        old, new = (
            _Side(
                overlay,
                {path: pair[number] for path, pair in states.items()},
                {path: pair[number] for path, pair in notes.items()},
            )
            for number in (0, 1)
        )
        for path in paths:
            yield path, old.version(path), new.version(path)


def _notes(
    overlay: Overlay, states: Mapping[str, tuple[State, State]]
) -> dict[str, tuple[Note | None, Note | None]]:
    """Return the notes that were written, changed or removed between the two, by the paths they are about."""
    objects = overlay.layer.undo.opened().objects
    found: dict[str, tuple[Note | None, Note | None]] = {}
    for path, pair in states.items():
        if is_note(path):
            read = [parse(objects.read_blob(each.oid)) if each.kind == "file" else None for each in pair]
            for about in {each[0] for each in read if each is not None}:
                old, new = (None if each is None else each[1] for each in read)
                found[about] = (old, new)
    return found


class _Side:
    """One of the two boundaries."""

    def __init__(
        self, overlay: Overlay, states: Mapping[str, State], notes: Mapping[str, Note | None]
    ) -> None:
        self._overlay = overlay
        self._states = states
        self._notes = notes

    def _note_on(self, path: str) -> Note | None:
        return self._notes[path] if path in self._notes else self._overlay.notes.get(path)

    def version(self, path: str) -> Version | None:
        """Return what a path showed."""
        undo = self._overlay.layer.undo
        state = self._states.get(path)
        if state is None:
            state = undo.look(path, keep=True)
        if state.kind != "absent":
            return undo.opened().version(state)
        if is_hidden(path, self._note_on):
            return None
        mark = self._overlay.past.fingerprint(path)
        return version_of(mark, lambda: self._overlay.content_before(path))
