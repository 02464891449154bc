"""Three kinds of shared prefix: one system instruction, a few tool schemas, many document templates.

`system-instruction`: every request behind one instruction of 2,768 tokens, the median of Claude Code's (2,772); what
follows it, and the answers, are assumed. `tool-schema`: eight sets of tools of 12,288 tokens each, the median of Claude
Code's (12,262); answers as there at p50 and p90, a quarter shorter at p99. `document-template`: 64 documents of 2,736
tokens, the median arXiv prompt of Vidur (2,730); answers as there at p50 and p90, without its long tail. How popular
each is (Zipf), and what a request adds, are assumed. All that is shared is found but for the first time.
"""

from __future__ import annotations

from sim.workload.shared_prefix import SharedPrefix


def system_instruction() -> SharedPrefix:
    return SharedPrefix(num_applications=1, prefix_tokens=2768, own_median=256, output_median=192)


def tool_schema() -> SharedPrefix:
    return SharedPrefix(
        default_rate=1.0,
        num_applications=8,
        application_skew=1.0,
        prefix_tokens=12288,
        content_size=512,
        own_median=512,
        own_sigma=1.0,
        own_most=8192,
        output_median=218,
        output_sigma=1.1,
        output_most=4096,
    )


def document_template() -> SharedPrefix:
    return SharedPrefix(
        default_rate=2.0,
        num_applications=64,
        application_skew=0.8,
        prefix_tokens=2736,
        own_median=512,
        output_median=167,
        output_sigma=0.62,
        output_most=4096,
    )
