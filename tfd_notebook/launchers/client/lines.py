"""Lines in messages of any size."""

from __future__ import annotations

from tfd_notebook.net import validation


class LineBuffer:
    """The part of a line that has arrived."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that `data` completes, each with its end.

        Raises
        ------
        InvalidMessage
            A line is longer than a message may be.
        """
        *lines, last = data.split(b"\n")
        if lines:
            validation.check_size(len(self._rest) + len(lines[0]))
            lines[0] = bytes(self._rest) + lines[0]
            self._rest.clear()
        self._rest += last  # in place: small messages cost no more than a large one
        validation.check_size(len(self._rest))
        return [line + b"\n" for line in lines]
