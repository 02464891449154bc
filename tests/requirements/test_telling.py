"""The article's requirements on what leaves the process: nobody's words or name, everybody's class, every policy.

Under each test stands what it was seen to fall for: a change to the project that breaks the requirement.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
import traceback
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest

from backend.front import Front
from backend.generate import Wish, generate
from backend.principals import Principals
from backend.start import start
from policies.config import EngineConfig
from policies.prompt import TokenPrompt
from policies.types import Context, Request, RequestRecord, Sample, StepOutput
from sim.cost import AffineCost
from sim.export import export
from sim.html_report import Reported, html
from sim.metrics import MAX_CLASSES, ClassSummary, Summary
from sim.report import Banded
from sim.simulate import Run, simulate
from sim.workload.workload import WorkItem, Workload
from tests.backend.echo import Echo
from tests.conftest import REPOSITORY
from tests.requirements.test_article import SMALL, manifest_of, report
from tests.worlds import request, state_of, step, tiny_config, tiny_engine

SECRET, ANN = bytes(range(32)), Context("acme", "ann", "mail")
WORDS = tuple(range(8_675_309, 8_675_309 + 17))  # token ids that are no other number here


def _holds_a_word(text: str) -> bool:
    return "86753" in text or any(repr(each.to_bytes(8, "little"))[2:-1] in text for each in WORDS)


def test_s22_journal_records_exports_dumps_and_messages_hold_no_token_and_no_name(tmp_path: Path) -> None:
    lines: list[str] = []
    engine, echo = tiny_engine(lines.append, num_blocks=32, isolation="tenant", secret=SECRET), Echo(fails=[2])
    principals = Principals(SECRET)
    key = principals.enrol(ANN)

    async def scene() -> tuple[list[RequestRecord], str]:
        async with Front(engine, echo) as front:
            answers = [
                front.ask(principals.vouch(key, Request(name, 0.0, TokenPrompt(WORDS), 4, "acme-ann")))
                for name in ("one", "two", "three")
            ]
            for answer in answers:
                await answer.end()
        (error, *_) = [answer.error for answer in answers if answer.error is not None]
        dump = traceback.TracebackException.from_exception(error, capture_locals=True)
        return [answer.record for answer in answers if answer.record], "".join(dump.format())

    records, dump = asyncio.run(scene())
    assert "step 2 went wrong" in dump
    made = Run(records, [], SMALL.step_ends, (), 0, 0, engine, (engine,))
    for ending in ("csv", "jsonl"):
        export(tmp_path / f"requests.{ending}", made)
    exported = "".join(path.read_text() for path in tmp_path.iterdir())
    told = {"journal": "\n".join(lines), "records": repr(records), "dump": dump, "export": exported, **_shown()}
    for name, text in told.items():
        assert not _holds_a_word(text), name
        assert "acme" not in text and key not in text, name


def _shown() -> dict[str, str]:
    """What a debugger or a log shows of requests, blocks, steps."""
    engine = tiny_engine(isolation="tenant", num_blocks=32)
    asked = replace(request("it", TokenPrompt(WORDS)), context=ANN)
    engine.add(asked, now=0.0)
    plan = step(engine, now=0.0)
    shown = (asked, asked.prompt, state_of(engine, "it"), engine.kv.blocks, plan, StepOutput(0.0, {}, {"it": WORDS}))
    return {f"{type(each).__name__}": repr(each) + str(each) for each in shown}


# Falls if the repr of a TokenPrompt shows its tokens, of a Request its context, of a Content its mark, of a StepOutput
# its tokens; if a journal tells the client's name as the body gave it.


def test_s22_what_was_asked_cannot_be_tried_out_on_a_journal() -> None:
    """Two runs of one prompt have no key in common: whoever reads one cannot make them from a guess."""
    body, keys = start("tiny", settings={"max_model_len": 64}), list[set[str]]()
    for _ in range(2):
        lines: list[str] = []
        generate(body, ["the capital of France is Paris"], Wish(max_tokens=2), lines.append)
        added = [line for line in map(json.loads, lines) if "add" in line]
        keys.append({str(first) for line in added for first, _ in line["keys"]})
    assert keys[0] and not keys[0] & keys[1]


# Falls if `generate` builds its engine without a secret (as it did).


def named(num_classes: int) -> Run:
    """Requests of many tenants, users and clients, told by "zz"; some are refused for what they ask."""
    items = [
        WorkItem(
            replace(
                request(n, 8, max_tokens=4, arrival_time=0.1 * n, client_id=f"zz-client-{n % 50}",
                        class_name=f"class-{n % num_classes}"),
                context=Context(f"zz-tenant-{n % 50}", f"zz-user-{n}", f"zz-application-{n}", f"zz-session-{n}"),
            ), 4,
        )
        for n in range(200)
    ]  # fmt: skip
    made = tiny_config(isolation="tenant", admission="token_buckets,rate=1,burst=14,waits=false", num_blocks=64)
    return simulate(made, Workload("named", items), AffineCost(per_step=0.05))


def test_s36_no_tenant_client_or_user_is_in_any_figure_and_classes_are_few() -> None:
    done = named(num_classes=40)
    summary, banded = done.summary, Banded("it", done.summary)
    page = html([Reported(banded, done)], manifest_of(engine={"isolation": "tenant"}))
    texts = {"json": json.dumps(summary.to_dict()), "report": report(summary), "page": page}
    assert summary.num_rejected > 0 and "rejected" in page
    for name, text in texts.items():
        assert "zz-" not in text, name
    assert len(summary.classes) == MAX_CLASSES + 1 and "(others)" in summary.classes
    assert sum(each.num_requests for each in summary.classes.values()) == 200
    labels = [*(each.name for kind in (Summary, ClassSummary) for each in fields(kind)), *Sample._fields]
    assert not any(word in label for label in labels for word in ("tenant", "client", "user", "session"))


# Falls if `token_buckets` names the client it refuses (as it did), if `_class_names` keeps every class.


def test_s34_the_page_and_the_report_show_every_class_on_its_own_unasked() -> None:
    done = named(num_classes=2)
    page = html([Reported(Banded("it", done.summary), done)], manifest_of())
    assert "By class of request" in page and page.count("class-0") > 2
    assert "class-0" in report(done.summary) and "class-1" in report(done.summary)


# Falls if `print_run` leaves out the table of classes.


@pytest.mark.parametrize("isolation", [None, "user", "hierarchical,barrier=64"])
def test_s23_the_scope_of_sharing_stands_in_every_report_whatever_it_is(isolation: str | None) -> None:
    """Unasked, the default too: on the terminal, in the JSON's manifest and on the page."""
    engine = {} if isolation is None else {"isolation": isolation}
    scope, about = isolation or EngineConfig().isolation, manifest_of(engine=engine)
    assert f"prefixes shared: {scope}" in report(SMALL.summary, engine=engine)
    assert json.loads(json.dumps(about))["engine"]["isolation"] == scope
    assert f"prefixes shared: {scope}" in html([Reported(Banded("it", SMALL.summary), SMALL)], about)


# Falls if `print_basis` names only a scope that is not the default's.

CACHING = re.compile(r"\b(cach\w*|prefix\w*|hits?|reuse\w*)\b", re.I)
SOONER = re.compile(r"\b(faster|quick\w*|speed\w*|speeds|accelerat\w*|sooner)\b", re.I)
DECODING = re.compile(r"\b(decod\w*|TPOT|ITL|every stage|all stages|output tokens?|gaps?)\b", re.I)


def sentences() -> Iterator[tuple[str, str]]:
    """Of all that people read: documents but the list of mistakes itself, and strings of the program."""
    for path in sorted(REPOSITORY.rglob("*.md")):
        if path.name != "requirements.md" and not set(path.relative_to(REPOSITORY).parts) & {".venv", "shared"}:
            yield from ((path.name, each) for each in re.split(r"(?<=[.;|])\s|\n\n", path.read_text()))
    for path in _sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from ((path.name, each) for each in re.split(r"(?<=[.;])\s|\n\n", node.value))


def _sources() -> list[Path]:
    rooms = [REPOSITORY / room for room in ("sim", "backend", "policies", "calibration")]
    return [*(path for room in rooms for path in room.rglob("*.py")), REPOSITORY / "cli.py", REPOSITORY / "app.py"]


def test_s59_nowhere_is_it_said_that_caching_speeds_up_decoding() -> None:
    found = [each for each in sentences() if all(kind.search(each[1]) for kind in (CACHING, SOONER, DECODING))]
    assert [each for each in found if not re.search(r"\b(no|not|never|nor)\b", each[1])] == []


# Falls with a line "prefix hits: decodes are faster" in `verdicts`, or a sentence like it in the README.
