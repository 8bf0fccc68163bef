"""Hard limits of the wire, the same for every node of every cluster.

They bound what a remote can make us hold or decode. Limits that a deployment may tune are fields of `GossipConfig`;
these here are part of the protocol: changing one means a new `PROTOCOL_VERSION`.
"""

from __future__ import annotations

import re
from typing import Final

#: First byte of every datagram and stream frame.
PROTOCOL_VERSION: Final = 1

#: Node names and cluster labels.
NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")
MAX_NAME_BYTES: Final = 64

#: Opaque bytes that ride on a member's record, such as its HTTP address.
MAX_META_BYTES: Final = 512

#: Payload of one load row. With its header it still fits one datagram of 1400 bytes.
MAX_ROW_BYTES: Final = 1024
#: The same with its header (name, boot and sequence number at their largest).
MAX_ENCODED_ROW_BYTES: Final = MAX_ROW_BYTES + 100

#: A network coordinate; more than one has, so that a later version may have more dimensions.
MAX_COORDINATE_BYTES: Final = 128

#: Key and value of the slow state.
MAX_KEY_BYTES: Final = 64
MAX_VALUE_BYTES: Final = 1024

#: Longest datagram that is looked at. Ours stay within `GossipConfig.datagram_budget`; a peer may be set higher.
MAX_DATAGRAM_BYTES: Final = 9000

#: Longest packet in a frame of a stream; the largest real one is the member table, 4096 members of about 700 bytes.
#: Sealed it is a little longer on the wire.
MAX_FRAME_BYTES: Final = 4 * 1024 * 1024
MAX_SEAL_BYTES: Final = 64

#: Parts in one packet, rows in one packet, members in one table exchange, entries of one delta, marks of one digest.
MAX_PARTS: Final = 1024
MAX_ROWS: Final = 1024
MAX_RECORDS: Final = 4096
MAX_DELTA_ENTRIES: Final = 65_536
MAX_MARKS: Final = 4096

#: Boot counters, versions and sequence numbers. The packed incarnation (see `incarnation.py`) has 16 bits more.
MAX_BOOT: Final = 1 << 44
MAX_INCARNATION: Final = 1 << 60
MAX_COUNTER: Final = 1 << 53

#: Ages of rows on the wire are in hundredths of a second, so that most take one byte; at most about 497 days.
AGE_UNIT_S: Final = 0.01
MAX_AGE: Final = 1 << 32
