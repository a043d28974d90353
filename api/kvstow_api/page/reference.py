"""Shows the OpenAPI description as a page for people. The page has no script, so it works under the content security
policy of the status page. The usual viewers of OpenAPI do not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from kvstow_api.page.policy import asset, headers

_METHODS = ("get", "put", "post", "patch", "delete")
_LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "pattern": "like {}",
    "default": "default {}",
}


class Reference(NamedTuple):
    """The page, and the headers with which it is sent."""

    html: bytes
    headers: Mapping[str, str]


def reference(description: Mapping[str, Any]) -> Reference:
    """Make the page of an OpenAPI description that FastAPI has made. This takes tens of milliseconds."""
    style, info = asset("reference.css"), description["info"]
    schemas = description["components"]["schemas"]
    groups: dict[str, list[str]] = {}
    for path, item in description["paths"].items():
        for method in filter(item.__contains__, _METHODS):
            operation = item[method]
            groups.setdefault(operation["tags"][0], []).append(_operation(method, path, operation))
    links = "".join(f'<a href="#{tag}">{tag}</a> ' for tag in [*groups, "types"])
    parts = [f'<section><h2 id="{tag}">{tag}</h2>{"".join(items)}</section>' for tag, items in groups.items()]
    parts.append(f'<section><h2 id="types">types</h2>{"".join(map(_schema, schemas, schemas.values()))}</section>')
    html = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(info['title'])}</title>\n"
        f'<link rel="icon" href="data:,">\n<style>{style}</style>\n</head>\n<body>\n'
        f"<header><h1>{escape(info['title'])}</h1><p>{escape(info['description'])} Version {escape(info['version'])}."
        f' <a href="openapi.json">openapi.json</a> <a href="./">status page</a></p><nav>{links}</nav></header>\n'
        f"<main>{''.join(parts)}</main>\n</body>\n</html>\n"
    )
    return Reference(html.encode(), headers(style))


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> str:
    parts = [_prose(operation.get("description", ""))]
    if parameters := operation.get("parameters"):
        rows = (
            (_code(one["name"]), one["in"], _type(one["schema"]), _remarks(one.get("description", ""), one))
            for one in parameters
        )
        parts.append(_table(("parameter", "in", "type", "what it is"), rows))
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        parts.append(f"<h3>Body</h3><p>{_code(media)}: {_type(content.get('schema', {}))}</p>")
    answers, problems = [], []
    for status, response in operation["responses"].items():
        if "$ref" in response:
            problems.append(status)
            continue
        kinds = response.get("content", {})
        types = ", ".join(f"{_code(media)} {_type(content.get('schema', {}))}" for media, content in kinds.items())
        answers.append((_code(status), escape(response["description"]), types))
    parts.append("<h3>Answers</h3>" + _table(("status", "when", "what"), answers))
    if problems:
        parts.append(f"<p>Problems: {', '.join(problems)}, as {_link('ProblemView')}.</p>")
    if method != "get" or "security" in operation:
        parts.append('<p class="quiet">May need a token: <code>Authorization: Bearer TOKEN</code>.</p>')
    name = f'<b class="{method}">{method.upper()}</b> <code>{escape(path)}</code>'
    return _details(operation.get("operationId", path), f"{name} <span>{_first(operation)}</span>", parts)


def _first(operation: Mapping[str, Any]) -> str:
    """Return the first sentence of the description."""
    text = operation.get("description") or operation.get("summary", "")
    return _inline(re.split(r"(?<=\.)\s", text, maxsplit=1)[0])


def _schema(name: str, schema: Mapping[str, Any]) -> str:
    parts = [_prose(schema.get("description", ""))]
    rows = (
        (_code(field), _type(one), _remarks(one.get("description", ""), {"schema": one}))
        for field, one in schema.get("properties", {}).items()
    )
    parts.append(_table(("field", "type", "what it is"), rows))
    examples = (json.dumps(one, indent=2) for one in schema.get("examples", ()))
    parts += [f"<h3>Example</h3><pre>{escape(one)}</pre>" for one in examples]
    return _details(f"type-{name}", f"<code>{escape(name)}</code>", parts)


def _details(name: str, summary: str, parts: Iterable[str]) -> str:
    """Make a part that is closed at first. A browser opens it when a link leads to `name`, which is inside."""
    return f'<details><summary>{summary}</summary><div id="{escape(name)}">{"".join(parts)}</div></details>\n'


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return _link(schema["$ref"].rpartition("/")[2])
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(map(_type, choices))
    if "enum" in schema:
        return " | ".join(_code(str(one)) for one in schema["enum"])
    if "const" in schema:
        return _code(json.dumps(schema["const"]))
    kind = str(schema.get("type", "any value"))
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if kind == "object" and isinstance(inner := schema.get("additionalProperties"), dict):
        return f"object with values of {_type(inner)}"
    return escape(f"{kind} ({schema['format']})" if "format" in schema else kind)


def _remarks(text: str, item: Mapping[str, Any]) -> str:
    """Return the description, and the limits of the value in words."""
    return "; ".join(
        filter(None, (_inline(text), "required" if item.get("required") else "", *_limits(item["schema"])))
    )


def _limits(schema: Mapping[str, Any]) -> Iterator[str]:
    for part in (schema, *schema.get("anyOf", ())):
        for name, words in _LIMITS.items():
            if part.get(name) not in (None, ""):
                yield escape(words.format(part[name]))


def _link(name: str) -> str:
    return f'<a href="#type-{escape(name)}">{escape(name)}</a>'


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Make a table. Columns that are empty in all rows are left out."""
    given = list(rows)
    shown = [number for number in range(len(titles)) if any(row[number] for row in given)]
    if not shown:
        return ""
    head = "".join(f'<th scope="col">{titles[number]}</th>' for number in shown)
    body = "".join(f"<tr>{''.join(f'<td>{row[number]}</td>' for number in shown)}</tr>" for row in given)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _prose(text: str) -> str:
    return "".join(f"<p>{_inline(part)}</p>" for part in text.strip().split("\n\n") if part)


def _inline(text: str) -> str:
    """Escape text, and show words in backquotes as code."""
    parts = text.split("`")
    return "".join(_code(part) if number % 2 else escape(part) for number, part in enumerate(parts))


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"
