"""The capture store: one file per protocol."""

from tokencustody.store.ledger import SqlLineageStore
from tokencustody.store.opening import CaptureStore, open_store
from tokencustody.store.sink import SqlTokenSink
from tokencustody.store.source import SqlTokenSource

__all__ = ["CaptureStore", "SqlLineageStore", "SqlTokenSink", "SqlTokenSource", "open_store"]
