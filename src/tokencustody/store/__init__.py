"""What a program opens: sink, source, resolver and ledger, and the staging store, one module for each protocol."""

from tokencustody.codec.attachments import AttachedBuffer
from tokencustody.store.ledger import SqlLineageStore
from tokencustody.store.opening import CaptureStore, open_store
from tokencustody.store.sink import SqlTokenSink
from tokencustody.store.source import SqlTokenSource
from tokencustody.store.staging import SqlStagingStore

__all__ = [
    "AttachedBuffer",
    "CaptureStore",
    "SqlLineageStore",
    "SqlStagingStore",
    "SqlTokenSink",
    "SqlTokenSource",
    "open_store",
]
