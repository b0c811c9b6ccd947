"""The classes that a reply can be rejected for, in the order in which one of several is reported.

Transport first, then the request's mode, the finish, the text, the tools' structure, emptiness,
counts. A class that is not listed comes from a backend's own classification: transport.
"""

from collections.abc import Iterable

ORDER: tuple[str, ...] = (
    # transport and body
    "no_reply",
    "body_truncated",
    "body_not_json",
    "body_too_deep",
    "stream_incomplete",
    "stream_idle_timeout",
    "rate_limited",
    "upstream_error_midstream",
    "content_filtered",
    "empty_choices",
    "reply_malformed",
    # prompt and request mode
    "control_string_in_prompt",
    "prompt_ids_differ",
    "thinking_mode_mismatch",
    "tool_choice_violated",
    # finish
    "finish_missing",
    "finish_unknown",
    "truncated_length",
    # text
    "token_id_unknown",
    "ids_text_mismatch",
    "lone_surrogate",
    "replacement_char",
    "unknown_marker",
    "marker_fragment",
    "markers_unbalanced",
    "tool_section_unterminated",
    "marker_in_reasoning",
    "control_string_in_output",
    "reasoning_fields_disagree",
    "reasoning_withheld",
    # tool structure
    "tool_section_empty",
    "tool_section_noise",
    "tool_calls_disagree",
    "tool_id_malformed",
    "tool_id_name_mismatch",
    "tool_id_duplicate",
    "tool_args_not_text",
    "tool_args_too_deep",
    "tool_args_invalid_json",
    "tool_args_not_object",
    # emptiness
    "empty_answer",
    "empty_completion",
    # counts
    "tool_call_lost",
    "prompt_count_mismatch",
    "count_mismatch",
    "degenerate_repetition",
)
_RANK = {name: i for i, name in enumerate(ORDER)}


def first_class(problems: Iterable[str]) -> str | None:
    """The one to report; None without problems."""
    return min(problems, key=lambda name: _RANK.get(name, -1), default=None)


def is_before(name: str, other: str) -> bool:
    return _RANK.get(name, -1) < _RANK[other]
