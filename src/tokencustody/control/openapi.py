"""The control routes as an OpenAPI document, for whoever writes another client."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from pydantic.json_schema import models_json_schema

from tokencustody.control.wire import CONTROL_ROUTE_PREFIX, ROLLOUT_ID_PATTERN, RolloutIds
from tokencustody.staging.records import RolloutManifest, RolloutRemoval

_ERRORS = {
    400: "A rollout id outside the rules.",
    401: "The token is missing or wrong. Nothing else was looked at.",
    408: "The body did not arrive in time.",
    409: "The removal is refused now.",
    410: "The rollout is retired.",
    413: "The body is too large.",
    422: "The body is malformed.",
    503: "The store is not available.",
}


def control_openapi() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the control routes, `/healthz` and `/metrics`. No route serves it."""
    _, definitions = models_json_schema(
        [(RolloutIds, "validation"), (RolloutManifest, "serialization"), (RolloutRemoval, "serialization")],
        ref_template="#/components/schemas/{model}",
    )
    schemas = definitions["$defs"] | {
        "Error": _object({"detail": {"type": "string"}}),
        "Health": _object({"status": {"enum": ["ok", "unavailable"]}}),
    }
    rollout_id = {
        "name": "rollout_id",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "pattern": ROLLOUT_ID_PATTERN},
    }
    body = {"required": True, "content": {"application/json": {"schema": _ref("RolloutIds")}}}
    removal = {200: "RolloutRemoval"}
    paths = {
        "/rollouts/{rollout_id}/manifest": {
            "parameters": [rollout_id],
            "get": _operation("Read the ledger of a rollout.", {200: "RolloutManifest"}, 400, 401, 410, 503),
        },
        "/rollouts/retire": {
            "post": {"requestBody": body}
            | _operation("Remove records, keep fences.", removal, 400, 401, 408, 409, 413, 422, 503)
        },
        "/rollouts/delete": {
            "post": {"requestBody": body}
            | _operation("Remove records and fences.", removal, 400, 401, 408, 409, 413, 422, 503)
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "tokencustody control routes", "version": version("tokencustody")},
        "paths": {CONTROL_ROUTE_PREFIX + path: item for path, item in paths.items()}
        | {
            "/healthz": {
                "get": {"security": []} | _operation("Ask for health.", {200: "Health", 503: "Health"})
            },
            "/metrics": {
                "get": {
                    "summary": "Read the counters of the process.",
                    "responses": {
                        "200": {
                            "description": "Prometheus text",
                            "content": {"text/plain": {"schema": {"type": "string"}}},
                        },
                        "401": _response(_ERRORS[401], "Error"),
                    },
                }
            },
        },
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }


def _operation(summary: str, answers: dict[int, str], *errors: int) -> dict[str, Any]:
    responses = {str(status): _response("The answer.", schema) for status, schema in answers.items()}
    responses |= {str(status): _response(_ERRORS[status], "Error") for status in errors}
    return {"summary": summary, "responses": responses}


def _response(description: str, schema: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": _ref(schema)}}}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}
