"""The report page: what it advises follows the figures, and it is a page that anybody can open and keep."""

from dataclasses import replace
from html.parser import HTMLParser

import pytest
from headstart.eval.figures.environment import Environment, TargetInfo
from headstart.eval.figures.metrics import AcceptancePart
from headstart.eval.measurement.result import Result
from headstart.eval.report.causes.acceptance_causes import ACCEPTANCE_RULES
from headstart.eval.report.causes.diagnosis import TIME_RULES, costs_more_than_it_saves, diagnose
from headstart.eval.report.causes.findings import Case, is_lower
from headstart.eval.report.charts import Series, line_chart, round_steps
from headstart.eval.report.page import render, write_page
from headstart.eval.report.recommendation import lossless_evidence, recommend
from headstart.eval.report.results.document import Report
from results import made_result

VOID = {"meta", "br", "link", "img", "input", "hr"}
NBSP = "\xa0"
RULES = {rule.__name__: rule for rule in (*ACCEPTANCE_RULES, *TIME_RULES)}


def counted(length, rounds=1000, rates=(0.6, 0.6, 0.6)):
    return {"num_rounds": rounds, "acceptance_length": length, "acceptance_rate": list(rates)}


def part(length, rounds=1000):
    return AcceptancePart(**counted(length, rounds))


def repetition(looping=0):
    return {"texts": [{"prompt": i, "repeated": 0.9 if i < looping else 0.1} for i in range(20)]}


def result(**changes) -> Result:
    """A result of a head that pays: K 3, 2.2 tokens per forward, 1.5 times as fast. changes: keys as in report.json."""
    entry = made_result(max_new_tokens=128).to_json() | {
        "num_tokens": 2200,
        "num_rounds": 1000,
        "acceptance_length": 2.72,
        "acceptance_rate": [0.8, 0.7, 0.65],
        "tokens_per_second": 150.0,
        "baseline_tokens_per_second": 100.0,
        "speedup": 1.5,
        "speedup_ci95": [1.4, 1.6],
        "repetition": repetition(),
        "timing": {"draft_ms": 1.0, "verify_ms": 12.0, "overhead_ms": 0.5, "baseline_ms": 10.0, "formula_speedup": 2.0}
        | {"ttft_ms": 12.0, "baseline_ttft_ms": 10.0, "end_to_end_speedup": 1.4},
        "baseline_bandwidth": {"gigabytes_per_second": 7.0, "share_of_copy": 0.7},
        "step_medians": medians(),
        "disturbance": {"num_passes": 6, "num_disturbed": 0, "num_again": 0, "reasons": [], "others_share": 0.02},
        "by_segment": {"answer": counted(2.72)},
        "by_context": {"0-127": counted(2.72)},
        "teacher_forced_acceptance_length": 2.7,
        "lossless": {"checked": 20, "identical": 20, "proved": 0, "unexplained": 0, "divergences": []},
    }
    assert set(changes) <= {*entry}
    return Result.from_json(entry | changes)


def report(*results, target="org/model"):
    environment = Environment(headstart="0.1.0", torch="2.13", device="a machine", copy_gigabytes_per_second=9.5)
    return Report(environment, TargetInfo(name=target, fingerprint="0f", dtype="float32", device="cpu"), [*results])


def slow(**changes):
    return result(**{"speedup": 0.8, "speedup_ci95": [0.7, 0.9], **changes})


def medians(verify=11.0):
    return {"round_ms": 13.0, "verify_ms": verify, "baseline_ms": 10.0, "baseline_verify_ms": 9.5}


def unexplained(**changes):
    lossless: dict = {"checked": 20, "identical": 19, "proved": 0, "unexplained": 1}
    lossless["divergences"] = [{"prompt": 4, "position": 17, "unproved": 19}]
    return result(**{"lossless": lossless, **changes})


class Reader(HTMLParser):
    """Reads a page, and holds that every element that opens is closed, in order."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts = [], [], [], []
        self.feed(page)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, key, value or "") for key, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).replace(NBSP, " ").split())


def everything():
    """A report with every kind of result and finding."""
    nothing = {"speedup": None, "speedup_ci95": [None, None], "acceptance_length": None, "tokens_per_second": None}
    nothing |= {"timing": dict.fromkeys(("draft_ms", "verify_ms", "overhead_ms", "baseline_ms", "formula_speedup"))}
    nothing |= {"acceptance_rate": [None] * 3, "teacher_forced_acceptance_length": None}
    parts = {"think": counted(2.9), "answer": counted(2.2)}
    contexts = {"512-2047": counted(1.3), "0-127": counted(2.9)}
    return report(
        result(),
        result(batch_size=4, speedup=0.9, speedup_ci95=(0.8, 1.1)),
        slow(tree="dynamic", num_drafted=5, acceptance_length=2.9),
        slow(tree="dynamic", num_drafted=24, acceptance_length=3.0),
        slow(suite="code", acceptance_length=1.4, by_segment=parts, by_context=contexts),
        result(drafter="medusa", draft_vocabulary={"size": 32000, "coverage": 0.9}, **nothing),
        unexplained(drafter="ngram"),
    )


# The page


def test_the_page_is_whole_and_says_what_was_measured():
    page = Reader(render(everything()))
    assert ("html", "lang", "en") in page.attributes and page.tags.count("h1") == 1
    assert page.tags.count("caption") == page.tags.count("table") >= 6
    assert page.tags.count("figcaption") == page.tags.count("figure") >= 4
    images = [(key, value) for tag, key, value in page.attributes if tag == "svg"]
    assert images.count(("role", "img")) == page.tags.count("svg")
    anchors = {value for _, key, value in page.attributes if key == "id"}
    assert {value[1:] for tag, key, value in page.attributes if (tag, key) == ("a", "href")} <= anchors
    for words in ("1.50 [1.40, 1.60]", "0.90 [0.80, 1.10]", "org/model", "2.13", "17"):
        assert words in page.text


def test_nothing_is_fetched_and_nothing_runs():
    page = render(everything())
    read = Reader(page)
    assert not {"script", "link", "iframe", "img", "object", "embed"} & set(read.tags)
    assert "http://" not in page and "https://" not in page and "url(" not in page and "@import" not in page
    assert all(value.startswith("#") for _, key, value in read.attributes if key in ("href", "src"))
    assert not [key for _, key, _ in read.attributes if key.startswith("on")]


def test_names_from_users_are_text_and_nothing_else():
    bad = '<script>alert("x")</script>&amp;\'"'
    entry = result(drafter=bad, suite=bad, by_segment={bad: counted(2.9), "b": counted(1.2)})
    page = render(report(entry, slow(suite="other", drafter=bad, tree="dynamic"), target=bad))
    read = Reader(page)
    assert "script" not in read.tags and "<script" not in page
    assert bad in read.text, "as it was written"
    assert {key for _, key, _ in read.attributes} <= {
        *("lang charset name content id class href tabindex role aria-label aria-labelledby scope").split(),
        *("viewbox x y x1 x2 y1 y2 width height d points cx cy r").split(),
    }


def test_the_page_stays_small_and_beside_the_report(tmp_path):
    """Its size follows the settings, not the prompts; 500 texts that differ are not all listed."""
    lossless: dict = {"checked": 500, "identical": 0, "proved": 0, "unexplained": 500}
    lossless["divergences"] = [{"prompt": i, "position": i, "unproved": i} for i in range(500)]
    entries = [
        slow(drafter=f"drafter{i}", batch_size=size, suite=suite, num_prompts=500, lossless=lossless)
        for i in range(4)
        for size in (1, 4, 16)
        for suite in ("chat", "code", "math")
    ]
    path = write_page(tmp_path, report(*entries))
    assert path == tmp_path / "report.html" and [one.name for one in tmp_path.iterdir()] == ["report.html"]
    assert path.stat().st_size < 400_000
    assert "Do not deploy: nothing was timed" in Reader(render(report())).text, "of no results"
    assert "Unexplained differences, 20 of 18000" in Reader(path.read_text()).text


# The recommendation


def test_the_best_proved_setting_is_advised():
    """By the lower end of its interval: 1.4 of the chain beats 1.2 of a tree with the higher speedup."""
    tree = result(tree="dynamic", num_drafted=24, speedup=1.8, speedup_ci95=(1.2, 2.4))
    advised = recommend([tree, result()])
    assert advised.is_good and advised.headline.replace(NBSP, " ") == "Deploy EAGLE-3, 3 drafts (20 prompts)"
    assert advised.figure == "1.50 [1.40, 1.60]" and "1.50 [1.40, 1.60] times as fast" in advised.reasons[0]
    assert any("best of 2 results" in one for one in advised.cautions)
    text = Reader(render(report(tree, result()))).text
    assert text.index("Deploy EAGLE-3") < text.index("1.50 [1.40, 1.60]") < text.index("40 of 40 texts equal")


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (slow(), "slower than no drafts"),
        (result(speedup_ci95=(0.98, 1.9)), "its interval reaches down to 0.98"),
        (result(speedup_ci95=(1.0, 1.9)), "its interval reaches down to 1.00"),
        (unexplained(), "1 of 20 texts differ"),
        (result(num_prompts=4, batch_size=4, speedup_ci95=(1.5, 1.5)), "an interval over fewer than 4 does not hold"),
        (result(speedup=None, speedup_ci95=(None, None)), "No answer had a token to speed up"),
    ],
)
def test_without_proof_nothing_is_advised(entry, why):
    advised = recommend([entry])
    assert not advised.is_good and advised.headline.startswith("Do not deploy") and why in advised.reasons[0]


def test_the_recommendation_names_where_it_does_not_hold():
    advised = recommend([result(), slow(suite="code"), slow(batch_size=8), slow(drafter="ngram")])
    cautions = [one.split(":")[0] for one in advised.cautions if "Not on" in one]
    assert [one.replace(NBSP, " ") for one in cautions] == ["Not on code, one at a time", "Not on chat, 8 at a time"]
    assert advised.headline.endswith(", for traffic like chat (20 prompts)")
    by_cost = recommend([result(verify_cost=0.1), slow(suite="code", verify_cost=0.2)])
    assert any("Not on code" in one for one in by_cost.cautions), "a draft's cost is measured for each suite"
    everywhere = recommend([result(), result(suite="code"), slow(batch_size=8)])
    assert everywhere.headline.endswith("3\xa0drafts (20 prompts)")


def disturbed(num):
    found = {"num_passes": 6, "num_disturbed": num, "num_again": 2, "reasons": ["other processes"], "others_share": 0.4}
    return result(disturbance=found)


@pytest.mark.parametrize(
    ("doubtful", "words"),
    [
        (result(num_prompts=5), "Only 5 prompts were timed"),
        (result(baseline_bandwidth={"gigabytes_per_second": 0.1, "share_of_copy": 0.01}), "1.0% of what a copy"),
        (disturbed(1), "1 of 6 passes disturbed (other processes, 40% of the processor on average over all passes)."),
        (result(num_prompts=60, batch_size=8, num_timed=8), "were repeated until the last batch was full."),
    ],
)
def test_the_recommendation_has_one_caution_for_what_makes_it_doubtful(doubtful, words):
    [caution] = recommend([doubtful]).cautions
    assert words in caution and recommend([result()]).cautions == []


def test_a_disturbed_result_is_marked():
    assert recommend([disturbed(1)]).figure == "1.50 [1.40, 1.60] !"
    assert "disturbed" not in recommend([disturbed(2)]).headline
    assert recommend([disturbed(3)]).headline.endswith("; but most of its measurement was disturbed")


def test_figures_that_cannot_be_true_are_never_deployed():
    """A verification of 8 ms beside a baseline's forward of 9.5."""
    alone = recommend([result(step_medians=medians(verify=8.0))])
    assert not alone.is_good and alone.headline.startswith("Do not deploy")
    assert "cannot be true: verifying takes 8.00 ms and a baseline step 9.50 ms" in alone.reasons[0]
    slower = result(drafter="ngram", speedup=1.2, speedup_ci95=(1.1, 1.3))
    beside = recommend([result(step_medians=medians(verify=8.0)), slower])
    assert beside.is_good and beside.figure == "1.20 [1.10, 1.30]"


def looping(speedup, **changes):
    """Eight of twenty texts loop. Args: speedup: of the others, with its interval."""
    ratio, *interval = speedup
    left = {"num_timed": 12, "acceptance_length": 1.2, "speedup": ratio, "speedup_ci95": interval}
    return result(repetition=repetition(8) | {"without_loops": left | changes})


def test_a_gain_that_rests_on_loops_is_not_deployed_and_one_that_stays_has_both_figures():
    for left in (looping((0.97, 0.9, 1.05)), looping((2.0, 1.5, 2.5), num_timed=3), looping((None, None, None))):
        advised = recommend([left])
        assert not advised.is_good
        assert advised.headline == "Do not deploy on this alone: the gain rests on texts that loop (20 prompts)"
        assert "8 of 20 texts repeat more than half of their 4-grams; " in advised.reasons[0]
    assert "without these 0.97 [0.90, 1.05]" in recommend([looping((0.97, 0.9, 1.05))]).reasons[0]
    text = Reader(render(report(looping((0.97, 0.9, 1.05)), result(suite="code")))).text
    assert text.count("8 of 20 texts repeat more than half of their 4-grams") == 1 and "Deploy EAGLE-3" in text
    stays = recommend([looping((1.3, 1.2, 1.4))])
    assert stays.is_good and "without these 1.30 [1.20, 1.40], 1.20 tokens per forward" in stays.cautions[0]


def test_what_is_left_without_loops_was_chosen_among_as_many():
    """Alone its interval lies above 1, as the best of ten it does not; of two it does, and is shown so."""
    seen, without = (
        [
            {"prompts": [i], "num_rounds": 1, "num_committed": 2, "baseline_seconds": gain + more, "seconds": 1.0}
            for i, gain in enumerate([1.05, 1.4, 1.1, 1.5, 1.2, 1.3])
        ]
        for more in (0.5, 0.0)
    )
    left = looping((1.26, 1.07, 1.48), num_timed=6, observations=without)
    left = replace(left, observations=result(observations=seen).observations)
    others = [slow(num_draft_tokens=k) for k in range(4, 13)]
    assert recommend([left, *others[:1]]).cautions[0].endswith("without looping texts [1.03, 1.53].")
    refused = recommend([left, *others])
    assert not refused.is_good and "it reaches down to 0.93 without looping texts" in refused.reasons[0]


@pytest.mark.parametrize(("prompts", "timed", "size"), [(2, None, 1), (20, 3, 1), (24, None, 8), (1, None, 1)])
def test_below_the_number_at_which_intervals_hold_there_is_no_verdict(prompts, timed, size):
    few = result(num_prompts=prompts, num_timed=timed, batch_size=size)
    count, unit = timed or prompts // size, "prompts" if size == 1 else "batches of\xa08"
    advised = recommend([few])
    words = f"only {count} {unit} were" if count > 1 else "only 1 prompt was"
    assert advised.headline == f"Do not deploy on this alone: {words} timed" and not advised.is_good
    slower = slow(num_prompts=prompts, num_timed=timed, batch_size=size)
    assert recommend([slower]).headline == advised.headline
    assert recommend([few, result(drafter="ngram")]).headline.startswith("Deploy n-gram look-ups")


def test_the_headline_says_that_prompts_were_learnt():
    words = "; but 25% of the prompts are prompts that the head was trained on"
    assert recommend([result(like_training={"learnt": 0.25, "asked": None})]).headline.endswith(words)
    assert recommend([slow(like_training={"learnt": 0.25, "asked": None})]).headline.endswith(words)
    assert "trained on" not in recommend([result(like_training={"learnt": 0.0, "asked": None})]).headline


def test_losslessness_is_reported_as_it_was_checked():
    assert lossless_evidence([result(), unexplained()]).startswith("39 of 40 texts equal")
    assert "1 differ UNEXPLAINED" in lossless_evidence([unexplained()])
    sampled = {"checked": 0, "identical": 0, "proved": 0, "unexplained": 0, "divergences": []}
    check = {"num_tokens": 900, "p_value": 0.31}
    drawn = result(temperature=1.0, lossless=sampled, sampling_check=check)
    said = (
        "over at least 900 tokens. A rule that gets 10.2% of the tokens wrong, all in one direction, would have been "
    )
    said += "seen with 95%;"
    assert f"p is 0.31 in the worst of 1 result, {said}" in lossless_evidence([drawn])
    assert lossless_evidence([result(), drawn]).startswith("20 of 20 texts equal")
    assert lossless_evidence([drawn]).startswith(
        "Texts behind drafts drawn at random do not visibly deviate from the target's own"
    )
    wrong = result(temperature=1.0, lossless=sampled, sampling_check={**check, "p_value": 1e-9})
    assert "DEVIATE" in lossless_evidence([wrong])
    assert "not distributed as the target's own" in recommend([wrong]).reasons[0]
    few = result(temperature=1.0, lossless=sampled, sampling_check={**check, "num_tokens": 9, "p_value": None})
    assert "Too few tokens" in lossless_evidence([few])


def test_each_kind_of_traffic_gets_what_pays_there():
    tree = result(tree="dynamic", num_drafted=24, suite="code", speedup_ci95=(1.6, 1.7))
    text = Reader(render(report(result(), tree, slow(suite="code"), slow(batch_size=8)))).text
    table = text[text.index("What pays where") :]
    rows = ["chat EAGLE-3, 3 drafts 1", "code EAGLE-3, dynamic tree of 24, 3 deep 1", "chat no drafts 8 -"]
    assert sorted(table.index(row) for row in rows) == [table.index(row) for row in rows]


# The diagnosis: each cause where it is planted, and nothing without it


def test_a_result_that_pays_has_no_finding():
    assert diagnose(Case(result(), [result()])) == []
    assert "No cause of low acceptance" in Reader(render(report(result()))).text


COSTLY = {"draft_ms": 9.0, "verify_ms": 11.0, "overhead_ms": 0.5, "baseline_ms": 10.0}
CHAIN = result()
LOW = {"acceptance_length": 1.6, "acceptance_rate": [0.4, 0.4, 0.25]}


@pytest.mark.parametrize(
    ("rule", "planted", "peers", "figures"),
    [
        ("sampling", {"temperature": 1.0, **LOW}, [], ["temperature 1", "1.60"]),
        (
            "sampling",
            {"temperature": 1.0, **LOW},
            [result(tree="sampled-chain", temperature=1.0)],
            ["--tree sampled-chain 2.72"],
        ),
        # 9 ms of drafting and 1 of verifying in three positions: 3.33 each, where position 3 adds 0.04 tokens
        ("too_many_drafts", {"timing": COSTLY, **LOW}, [], ["0.040 tokens", "3.33 ms", "--num-draft-tokens 1"]),
        ("other_domain", {"suite": "code", **LOW}, [CHAIN], ["1.60", "2.72 tokens per forward on chat"]),
        ("training_disagrees", {"teacher_forced_acceptance_length": 3.4}, [], ["3.40", "2.72", "2.64 to 2.78"]),
        ("cut_vocabulary", {"draft_vocabulary": {"size": 32000, "coverage": 0.95}}, [], ["32,000", "5.0%", "20.0%"]),
        ("costs_more_than_it_saves", {"timing": {**COSTLY, "draft_ms": 18.0}}, [], ["17.20 ms", "18.00 ms"]),
    ],
)
def test_a_planted_cause_is_found_with_its_figures(rule, planted, peers, figures):
    entry, rule = result(**planted), RULES[rule]
    finding = rule(Case(entry, [entry, *peers]))
    assert finding is not None and finding.cause and finding.advice
    assert all(figure in finding.figures for figure in figures), finding.figures
    assert rule(Case(result(), [result(), *peers])) is None, "and without it there is nothing to find"
    assert finding in diagnose(Case(entry, [entry, *peers]))


@pytest.mark.parametrize(
    ("rule", "near"),
    [
        ("sampling", {"temperature": 1.0}),  # accepted well all the same
        ("sampling", {"temperature": 1.0, "tree": "sampled-chain", **LOW}),
        ("too_many_drafts", {"timing": {**COSTLY, "draft_ms": 0.1, "verify_ms": 10.0}, **LOW}),  # drafts cost nothing
        ("too_many_drafts", {"timing": COSTLY, "tree": "dynamic", **LOW}),  # a tree's positions cost otherwise
        ("other_domain", {"suite": "code", "num_rounds": 5, **LOW}),  # too few rounds to tell
        ("other_domain", {"suite": "code", "batch_size": 4, **LOW}),  # nothing to compare with
        ("training_disagrees", {"teacher_forced_acceptance_length": 2.65}),  # cut last rounds
        ("training_disagrees", {"teacher_forced_acceptance_length": None}),
        ("cut_vocabulary", {"draft_vocabulary": {"size": 32000, "coverage": 0.999}}),
        ("costs_more_than_it_saves", {"timing": {**COSTLY, "draft_ms": 2.0}}),
    ],
)
def test_what_only_looks_like_a_cause_is_not_named(rule, near):
    assert RULES[rule](Case(result(**near), [result(**near), CHAIN])) is None


@pytest.mark.parametrize(
    ("changes", "blamed"),
    [({"draft_ms": 25.0}, "Drafting"), ({"verify_ms": 40.0}, "Verifying"), ({"overhead_ms": 30.0}, "The work around")],
)
def test_the_largest_cost_is_blamed(changes, blamed):
    finding = costs_more_than_it_saves(Case(result(timing={**COSTLY, **changes})))
    assert finding is not None and finding.cause.startswith(blamed)


def test_chance_is_no_difference():
    """3.0 against 2.6 tokens: over 1,000 rounds a difference, over 10 none."""
    assert is_lower(part(2.6), part(3.0))
    assert not is_lower(part(2.6, rounds=10), part(3.0, rounds=10))
    assert not is_lower(part(2.9, rounds=10**6), part(3.0, rounds=10**6)), "real, and too small to matter"


@pytest.mark.parametrize(("pays", "sizes"), [(slow, "1 and 8"), (result, "8")])
def test_batch_sizes_of_the_same_figures_are_one_finding_and_what_is_recommended_is_not_low(pays, sizes):
    low = [pays(**LOW, batch_size=size, teacher_forced_acceptance_length=1.6) for size in (1, 8)]
    text = Reader(render(report(*low))).text
    assert text.count("rejected at the first position") == 1 and f"EAGLE-3, 3 drafts, {sizes} at a time:" in text


def test_a_chart_has_the_same_contexts_for_every_drafter():
    """A head's are split at the length of its training rows too, for what is found of longer ones."""
    split = {"0-127": counted(2.0), "128-256": counted(2.4), "257-511": counted(2.8, rounds=3000)}
    plain = {"0-127": counted(2.0), "128-511": counted(2.5)}
    text = Reader(render(report(result(by_context=split), result(drafter="ngram", by_context=plain)))).text
    assert text.count("chat: 128-511") == 2 and "128-256" not in text and "2.70 (4000 rounds)" in text


# The charts


def test_lines_leave_out_what_was_not_measured():
    lines = [Series("a", [(0, 1.0), (2, 2.0)]), Series("b", [])]
    chart = Reader(line_chart("t", lines, axis="x", ticks=["1", "4", "8"]))
    points = [value.split() for tag, key, value in chart.attributes if (tag, key) == ("polyline", "points")]
    assert [len(one) for one in points] == [2, 2, 0, 2], "values and key of a, then of b"
    assert round_steps(1.0) == [0, 0.2, 0.4, 0.6, 0.8, 1.0] and round_steps(2.7) == [0, 1, 2]
