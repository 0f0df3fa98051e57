"""Overlap rounds on a GPU with the host's work: round r + 1 is started before the host reads what round r emitted.

Text, stop strings and new requests are handled while the device computes. Rounds on a CPU do not overlap; nothing of
the device's rounds (device_round.py) is imported there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from draftproof.core.device import is_cpu
from draftproof.engine.request import Session
from draftproof.engine.round import FinishedRound, Parts
from draftproof.models.rows import Rows

if TYPE_CHECKING:
    from draftproof.engine.device_round import DeviceRounds, Flight


@dataclass(slots=True)
class OverlappedRounds:
    """The rounds under way on a device, of which the host is one behind. `device` is None where no round overlaps."""

    device: "DeviceRounds | None" = None
    flights: "list[Flight]" = field(default_factory=list)
    """Rounds whose results the host has not read, oldest first: one at most, and two while the second is started."""
    needs_host: bool = False
    """Whether the next round must be run by the host: a row has a fault, or its draft model has no room."""

    def can_run(self, running: Sequence[Session], parts: Parts) -> bool:
        """Return whether the next round needs nothing of the host between its stages."""
        if self.device is None or not running or self.needs_host:
            return False
        return self.device.refusal(running, parts) is None

    def can_follow(self, running: Sequence[Session], wanted: Mapping[int, int], parts: Parts) -> bool:
        """Return whether a round of these draft lengths can start before the host reads the one under way."""
        assert self.device is not None
        limited = self.device.limited(running, [wanted[session.id] for session in running])
        return self.device.can_follow(self.flights[-1], running, limited, parts)

    def launch(self, running: Sequence[Session], wanted: Mapping[int, int], asked: list[int], parts: Parts) -> bool:
        """Start a round; False if it cannot be started, so that the host must run it.

        wanted  draft lengths by request, not limited to the room that is left: the device knows better than the host
                how much there is, and an end that is near would be a recording of its own
        asked   the same, limited to the room that the host knows of, for the record
        """
        assert self.device is not None
        limited = self.device.limited(running, [wanted[session.id] for session in running])
        flight = self.device.launch(list(running), limited, asked, parts)
        if flight is None:
            self.needs_host = True
            return False
        self.flights.append(flight)
        return True

    def land(self, running: Sequence[Session], *, is_typical: bool = True) -> FinishedRound:
        """Wait for the oldest round under way, and return what it emitted for the rows that still run."""
        assert self.device is not None
        flight = self.flights.pop(0)
        results, faulty = self.device.land(flight, running)
        self.needs_host |= faulty
        return FinishedRound(
            [session for session, _ in results],
            [emitted for _, emitted in results],
            [flight.asked[session.id] for session, _ in results],
            [flight.K] * len(results),
            flight.seconds(),
            is_typical and flight.is_typical,
        )

    def land_last(self, running: Sequence[Session]) -> FinishedRound:
        """Wait for the only round under way without starting another: the host then knows all rows."""
        try:
            return self.land(running)
        finally:
            self.drop()

    def drop(self) -> None:
        """Forget the rounds under way: the next one starts from what the host knows."""
        self.flights.clear()
        if self.device is not None:
            self.device.clear()

    def recorded_length(self, k: int) -> int:
        """Return the draft length to take where "auto" chose k: on a device only some lengths are recorded."""
        return k if self.device is None else self.device.recorded_length(k)

    def needed(self, session: Session) -> int:
        """Return the tokens that a row needs room for while rounds are under way."""
        return 0 if self.device is None else self.device.needed(session)


def overlapped_rounds_for(rows: Rows, max_batch: int, max_length: int | None) -> OverlappedRounds:
    """Return the overlapped rounds of an engine: rounds overlap where rows lie in a pool on a GPU."""
    if rows.pool is None or is_cpu(rows.pool.device):
        return OverlappedRounds()
    from draftproof.engine.device_round import DeviceRounds
    from draftproof.models.device_rows import DeviceRows

    return OverlappedRounds(DeviceRounds(rows, max_batch, max_length) if isinstance(rows, DeviceRows) else None)
