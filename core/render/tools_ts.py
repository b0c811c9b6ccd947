"""Tool declarations as Kimi-K2.5 prints them: a TypeScript namespace, or JSON for the whole list.

The checkpoint falls back to JSON as soon as one schema of the list cannot be typed; `declare` does
the same and says which schema it was. Rules: `tool_declaration_ts.py` of the K2.5 checkpoint,
checked against 351 golden blocks. Knows JSON schemas, nothing about messages or tokens.
"""

import json
from typing import Any, Literal, NamedTuple

import msgspec

from core.schema import Tool

ToolsMode = Literal["typescript", "json"]

_LISTED = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
_ENUM_CLASSES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
}
_CONSTRAINTS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_STEP = "  "


class ToolBlock(msgspec.Struct, frozen=True, kw_only=True):
    """Body of the tool_declare message. `fallback` names the schema that forced JSON, and why."""

    text: str
    mode: ToolsMode
    fallback: str | None = None


class _Untypable(Exception):
    """A schema that the checkpoint cannot print as TypeScript."""


def declare(tools: list[Tool]) -> ToolBlock:
    """The block that the checkpoint would print for these tools."""
    ordered = _sorted_keys(tools)
    try:
        text = _namespace(ordered)
        return ToolBlock(text=text, mode="typescript")
    except _Untypable as e:
        reason = str(e)
    except RecursionError:
        reason = "nested too deeply"
    return ToolBlock(text=compact_json(ordered), mode="json", fallback=reason)


def compact_json(tools: list[Tool]) -> str:
    """JSON as the template's `tojson(separators=(',', ':'))` prints it: non-ASCII kept."""
    return json.dumps(tools, ensure_ascii=False, separators=(",", ":"))


def _sorted_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted_keys(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [_sorted_keys(item) for item in value]
    return value


def _namespace(tools: list[Any]) -> str:
    blocks: list[str] = []
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise _Untypable(f"tools[{index}]: not an object")
        if tool.get("type") == "function" and tool.get("function"):
            blocks.append(_Function(tool["function"], f"tools[{index}]").text())
    if not blocks:
        raise _Untypable("no entry of type function")
    body = "\n".join(blocks)
    return f"# Tools\n\n## functions\nnamespace functions {{\n{body}\n}}\n"


class _Function:
    """One function: its interfaces, its comment, its type.

    `definitions` grows while schemas are walked, as nested `$defs` count from where they stand on.
    """

    def __init__(self, function: Any, where: str) -> None:
        if not isinstance(function, dict):
            raise _Untypable(f"{where}.function: not an object")
        self.name = function.get("name", "function")
        self.description = function.get("description")
        self.parameters = function.get("parameters") or {}
        self.where = f"{where} {self.name}"
        self.definitions: dict[str, Any] = {}
        self.refers_to_itself = False

    def text(self) -> str:
        if not isinstance(self.parameters, dict):
            raise _Untypable(f"{self.where}: parameters are not an object")
        fields = self._fields(self.parameters, "", self.where)
        refers_to_itself = self.refers_to_itself
        parts = []
        if refers_to_itself:
            # The checkpoint prints this one interface by name alone and without extra keys.
            parts.append(
                f"interface parameters {_braces([f.text for f in fields if f.rank < 2], '')}"
            )
        for name, schema in list(self.definitions.items()):
            at = f"{self.where}.$defs.{name}"
            if not isinstance(schema, dict):
                raise _Untypable(f"{at}: not an object")
            comment = _comment(schema.get("description"), "", at)
            parts.append(f"{comment}interface {name} {self._type(schema, '', at)}")
        body = "parameters" if refers_to_itself else _braces(_required_first(fields), "")
        comment = _comment(self.description, "", f"{self.where}.description")
        parts.append(f"{comment}type {self.name} = (_: {body}) => any;")
        return "\n".join(parts)

    def _type(self, schema: Any, indent: str, where: str) -> str:
        if isinstance(schema, bool):
            return "any" if schema else "null"
        if not isinstance(schema, dict):
            raise _Untypable(f"{where}: {type(schema).__name__} is not a schema")
        if not schema:
            return "any"
        if "$ref" in schema:
            return self._reference(schema["$ref"], where)
        if "anyOf" in schema:
            options = _items(schema["anyOf"], f"{where}.anyOf")
            return " | ".join(self._type(o, indent, f"{where}.anyOf") for o in options)
        if "enum" in schema:
            return _enum(schema, where)
        if "type" not in schema:
            raise _Untypable(f"{where}: no type, anyOf, enum or $ref")
        return self._typed(schema, indent, where)

    def _typed(self, schema: dict[str, Any], indent: str, where: str) -> str:
        kind = schema["type"]
        if isinstance(kind, list):
            unknown = [k for k in kind if not isinstance(k, str) or k not in _LISTED]
            if unknown:
                raise _Untypable(f"{where}: unknown type {unknown[0]!r} in a list of types")
            return " | ".join(_LISTED[k] for k in kind)
        if kind == "object":
            return _braces(_required_first(self._fields(schema, indent, where)), indent)
        if kind == "array":
            return self._array(schema, indent, where)
        return "number" if kind == "integer" else str(kind)

    def _reference(self, target: Any, where: str) -> str:
        if target == "#":
            self.refers_to_itself = True
            return "parameters"
        if isinstance(target, str) and target.startswith("#/$defs/"):
            name = target.rsplit("/", 1)[-1]
            if name in self.definitions:
                return name
        raise _Untypable(f"{where}: $ref {target!r} is neither # nor a name in $defs")

    def _array(self, schema: dict[str, Any], indent: str, where: str) -> str:
        items = schema.get("items")
        if not items:
            return "Array<any>"
        inner = indent + _STEP
        at = f"{where}.items"
        comment = _comments(items, inner, at)
        if comment:
            return f"Array<\n{comment}{inner}{self._type(items, inner, at)}\n{indent}>"
        return f"Array<{self._type(items, indent, at)}>"

    def _fields(self, schema: dict[str, Any], indent: str, where: str) -> list["_Field"]:
        """Fields in key order, `additionalProperties` last."""
        definitions = schema.get("$defs") or {}
        if not isinstance(definitions, dict):
            raise _Untypable(f"{where}.$defs: not an object")
        self.definitions |= definitions
        inner = indent + _STEP
        extra = schema.get("additionalProperties")
        extra_fields = []
        if extra is not None:
            kind = "never" if extra is False else self._type(extra, inner, f"{where}.*")
            extra_fields.append(_Field(2, f"{inner}[k: string]: {kind}"))
        if "properties" not in schema:
            return extra_fields
        properties = schema["properties"]
        if not isinstance(properties, dict):
            raise _Untypable(f"{where}.properties: not an object")
        required = _items(schema.get("required", []), f"{where}.required")
        fields = []
        for name, value in properties.items():
            comment = _comments(value, inner, f"{where}.{name}") + _default(value, inner)
            rank = 0 if name in required else 1
            kind = self._type(value, inner, f"{where}.{name}")
            fields.append(_Field(rank, f"{comment}{inner}{name}{'?' * rank}: {kind}"))
        return fields + extra_fields


class _Field(NamedTuple):
    """`rank`: 0 required, 1 optional, 2 the line for additionalProperties."""

    rank: int
    text: str


def _required_first(fields: list[_Field]) -> list[str]:
    return [f.text for f in sorted(fields, key=lambda f: f.rank)]


def _braces(fields: list[str], indent: str) -> str:
    return "{\n" + ",\n".join(fields) + f"\n{indent}}}" if fields else "{}"


def _enum(schema: dict[str, Any], where: str) -> str:
    values = _items(schema["enum"], f"{where}.enum")
    kind = schema.get("type")
    if isinstance(kind, list):
        if len(kind) not in (1, 2) or (len(kind) == 2 and "null" not in kind):
            raise _Untypable(f"{where}: enum with the types {kind}")
        kind = next((k for k in kind if k != "null"), "null")
    classes = _ENUM_CLASSES.get(kind) if isinstance(kind, str) else None
    for value in values:
        if classes and value is not None and not isinstance(value, classes):
            raise _Untypable(f"{where}: enum value {value!r} is not of type {kind}")
    return " | ".join(f'"{v}"' if isinstance(v, str) else str(v) for v in values)


def _comments(schema: Any, indent: str, where: str) -> str:
    if not isinstance(schema, dict):
        return ""
    text = _comment(schema.get("description"), indent, where)
    if not schema.keys() & {"$ref", "anyOf", "enum"}:
        kind = schema.get("type")
        names = _CONSTRAINTS.get(kind, ()) if isinstance(kind, str) else ()
        constraints = ", ".join(f"{n}: {schema[n]}" for n in names if n in schema)
        if constraints:
            text += f"{indent}// {constraints}\n"
    return text


def _default(schema: Any, indent: str) -> str:
    value = schema.get("default") if isinstance(schema, dict) else None
    if value is None:
        return ""
    number = isinstance(value, (bool, int, float))
    text = repr(value) if number else json.dumps(value, ensure_ascii=False)
    return f"{indent}// Default: {text}\n"


def _comment(description: Any, indent: str, where: str) -> str:
    if not description:
        return ""
    if not isinstance(description, str):
        raise _Untypable(f"{where}: description is not text")
    lines = description.split("\n")
    return "".join(f"{indent}// {line}\n" if line else "\n" for line in lines)


def _items(value: Any, where: str) -> list[Any]:
    """Whatever can be iterated, as the checkpoint takes it."""
    if not isinstance(value, (list, dict, str)):
        raise _Untypable(f"{where}: not a list")
    return list(value)
