"""What a control request can come to, besides the errors that the stores themselves raise.

A message names the rollout and the request, and repeats what the server said; it never contains the token.
"""

from __future__ import annotations


class ControlError(RuntimeError):
    """The server answered a control request with an error that repeating it will not cure."""


class ControlAuthError(ControlError):
    """The server does not accept the token. Nothing was read or removed."""


class RemovalRefusedError(ControlError):
    """The server refuses to remove these rollouts now, for the reason in the message. None of them was touched."""


class MalformedAnswerError(ControlError):
    """The server's answer is not what was asked for: broken, or about another rollout. It is not used."""
