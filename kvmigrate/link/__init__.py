"""The engine link: how the connector inside the engine and the node beside it talk, over a Unix stream socket.

`messages` are the typed messages, `codec` turns them into frames and back without I/O, `client` is the engine's side
(never blocks, never raises), `server` the node's side (asyncio). Import `EngineLink` from `kvmigrate.link.server`: the
engine does not need it.
"""

from .client import LinkClient
from .codec import MAX_FRAME_BYTES, FrameSplitter, decode, encode
from .messages import (
    Add,
    AddItem,
    Clear,
    Corrupt,
    Disconnected,
    Drop,
    Failed,
    Filled,
    Finished,
    FromEngine,
    Grant,
    Hello,
    Load,
    Loaded,
    Message,
    Pool,
    Prefilled,
    Pulled,
    Reset,
    Role,
    SlotGrant,
    Started,
    Stored,
    StoredItem,
    ToEngine,
    Want,
)

__all__ = [
    "MAX_FRAME_BYTES",
    "Add",
    "AddItem",
    "Clear",
    "Corrupt",
    "Disconnected",
    "Drop",
    "Failed",
    "Filled",
    "Finished",
    "FrameSplitter",
    "FromEngine",
    "Grant",
    "Hello",
    "LinkClient",
    "Load",
    "Loaded",
    "Message",
    "Pool",
    "Prefilled",
    "Pulled",
    "Reset",
    "Role",
    "SlotGrant",
    "Started",
    "Stored",
    "StoredItem",
    "ToEngine",
    "Want",
    "decode",
    "encode",
]
