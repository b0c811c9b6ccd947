"""Why peers and eyas differ, by cause: who is right, and why.

Seen with llm-router-utils 0.8.1 (SGLang's parsers) and renderers 0.1.12. Where golden vectors
exist, eyas equals the checkpoint in all of them.
"""

CAUSES = {
    # parse, stream, gateway
    "id_rewritten": (
        "eyas",
        "SGLang gives every call the id functions.NAME:(calls in the history + position), whatever"
        " index the model sampled (_process_tool_call_id)",
    ),
    "blanks_dropped": (
        "eyas",
        "the parser's pattern eats white space round a call's id and arguments; the ids hold it",
    ),
    "spelled_marker": (
        "eyas",
        "a marker that the model spelled in ordinary tokens is text; SGLang sees text alone and"
        " takes it for structure, and so does renderers for </think>",
    ),
    "rejected": (
        "eyas",
        "the ids break the grammar: eyas rejects the sample and says the class; SGLang drops or "
        "keeps"
        " the broken part without a word",
    ),
    "stream_partial_call": (
        "neither",
        "in a stream SGLang sends a call's arguments before the call is complete; whole, the call"
        " vanishes. Eyas rejects both",
    ),
    "stream_late_text": (
        "neither",
        "text after or between calls: SGLang's stream sends it as content, its whole reply drops "
        "it",
    ),
    "stream_lost_tail": (
        "eyas",
        "a stream that ends in `<|` loses these characters: the tool parser holds them back and "
        "never"
        " gives them up",
    ),
    "gateway_keeps_index": (
        "gateway",
        "the gateway's parser keeps the sampled id; its SGLang shape renumbers them later, and its"
        " OpenRouter shape lets them stand, as some providers do",
    ),
    "gateway_stricter": (
        "SGLang",
        "SGLang accepts bare counters, a second section and calls after the section's end; the"
        " gateway's reading is stricter. Only completions that eyas rejects",
    ),
    # rebuild
    "count_blind": (
        "truth",
        "another text or another split of the same length: no count can see it. Only on damage that"
        " keeps the count (a renumbered or repeated id, blanks, a non-canonical split)",
    ),
    # read
    "reader_strips": ("eyas", "renderers strips outer white space of reasoning and content"),
    "reader_parses_arguments": (
        "eyas",
        "renderers returns arguments as an object or stripped text; their spelling is gone",
    ),
    # render
    "marker_in_text": (
        "eyas",
        "renderers encodes all text with special tokens recognised, so a marker that a user typed"
        " becomes a real one (as the checkpoint's own encode does); eyas keeps it text",
    ),
    "encoded_in_pieces": (
        "eyas",
        "same text, other ids: renderers encodes `## Return of ID\\n` and the content, and each "
        "part"
        " of a list, on its own; the checkpoint encodes the rendered text as one",
    ),
    "long_run": ("eyas", "the checkpoint cuts runs of 25,000 characters; renderers does not"),
    "thinking_off": (
        "eyas",
        "with thinking off the template prints <think></think> for every turn of the history;"
        " renderers prints the reasoning of the last tool loop",
    ),
    "json_fallback": (
        "eyas",
        "one untypable schema turns the whole declaration into JSON; renderers raises, or prints"
        " TypeScript all the same",
    ),
    "keys_not_sorted": (
        "eyas",
        "the checkpoint sorts the keys of every schema; renderers does not",
    ),
    "python_spelling": (
        "eyas",
        "the checkpoint prints enum values and defaults with Python's str() (True, None, lists with"
        " single quotes); renderers prints JSON",
    ),
    "not_a_function": (
        "eyas",
        "the checkpoint prints entries of type function alone; renderers also those without a type"
        " and without a function",
    ),
    "defs_change": ("eyas", "renderers raises on nested $defs (dict changed while iterated)"),
}
