"""Front page without a browser: every row with its links, n/a with reasons, alarms first, hostile text harmless."""

import html
import json
import re

from leakbench.leaderboard.board.identity import row_id
from leakbench.leaderboard.board.threat_models import under
from leakbench.leaderboard.site import links
from leakbench.leaderboard.site.front import front_page
from leakbench.leaderboard.site.site import Guide, MethodWords

from ..conftest import claim, metric, record
from ..exports.conftest import HOSTILE
from .front_sites import front_site


def requires(access):
    return {"access": access, "knows": [], "controls": []}


def records():
    made = []
    for name, accuracy, auc, fields in (
        ("dp_sgd", 0.9, 0.6, {}),
        ("dpdr", 0.8, 0.7, {}),
        ("sgd", 0.95, 0.9, {"claim": claim(None), "control": "positive"}),
    ):
        made.append(
            record("utility", defense=name, metrics={"accuracy": metric(accuracy, 0.01, better="higher")}, **fields)
        )
        for attack, access, weaker in (("lira", "BLACK_BOX", 0.05), ("ratio", "ALL_STEPS", 0.0)):
            worst = {"auc": metric(auc - weaker, 0.02), "tpr_at_1pct_fpr": metric(0.05, 0.02)}
            made.append(record(defense=name, attack=attack, metrics=worst, requires=requires(access), **fields))
    return made


def embedded(text):
    """Numbers of the threat models."""
    (content,) = re.findall(r'id="under">(.*?)</script>', text, re.DOTALL)
    return json.loads(content)


def rows_of(text):
    return dict(re.findall(r'<tr role="row" class="line[^>]*data-row="(\w+)"[^>]*>(.*?)</tr>', text, re.DOTALL))


def test_every_row_is_there_and_links_to_its_page_defense_attack_and_suite():
    site = front_site(*records())
    text = front_page(site)
    lines = rows_of(text)
    assert set(lines) == {row.id for row in site.rows}
    for row in site.rows:
        targets = set(re.findall(r'href="([^"#]+)"', lines[row.id]))
        defense = links.defense_page(row.row.defense.name)
        assert targets == {links.row_page(row.id), defense, links.attack_page("ratio")}
    assert f'href="{links.suite_page("quick")}"' in text and f'href="{links.METHODS}"' in text
    assert re.findall(r'href="(board\.\w+)" download', text) == ["board.csv", "board.json", "board.parquet"]


def test_what_was_not_measured_is_n_a_with_its_reason_and_a_column_without_values_is_named():
    site = front_site(*records(), record("utility", defense="gep"))
    text = front_page(site)
    (line,) = [html for id_, html in rows_of(text).items() if id_ == row_id(_row(site, "gep"))]
    assert "no membership record" in line and line.count(">n/a<") >= 3
    (absent,) = re.findall(r"Left out, n/a in every row: (.*?)</p>", text)
    assert re.fullmatch(
        r"Proved ε \(no attack was run whose .*\); Worst PSNR \(no noisy reconstruction record\)\.", absent
    )


def _row(site, name):
    return next(row.row for row in site.rows if row.row.defense.name == name)


def test_numbers_of_a_threat_model_are_the_boards_own():
    site = front_site(*records())
    text = front_page(site)
    data = embedded(text)
    keys = re.findall(r'data-key="(\w+)"[^>]* data-depends', text)
    assert set(data["under"]) == {"BLACK_BOX", "ALL_STEPS"}
    for access, of_access in data["under"].items():
        of_row = {id_: cells for id_, _, cells in of_access}
        for row in under(site.board.rows, access):
            cells = dict(zip(keys, of_row[row_id(row)], strict=True))
            assert cells["auc"][0] == f"{row.auc.value:.3f}" and cells["auc"][3] == row.auc.value
    name = row_id(_row(site, "dp_sgd"))
    (cells,) = [cells for id_, _, cells in data["under"]["BLACK_BOX"] if id_ == name]
    attack = dict(zip(keys, cells, strict=True))["attack"]
    assert attack[0] == "lira" and attack[5] == links.attack_page("lira")


def test_alarms_come_before_the_board_and_refused_submissions_are_named():
    refuted = record(defense="refuted", flags=("claim_violated",))
    site = front_site(*records(), refuted, refused={"submissions/<x>": "SUBMISSION.toml: licence is empty"})
    text = front_page(site)
    assert text.index("CLAIM VIOLATED: ") < text.index("1 submission was set aside") < text.index('id="board"')
    assert "submissions/&lt;x&gt;" in text and "licence is empty" in text and "submissions/<x>" not in text


def test_a_suite_whose_control_failed_says_so_at_its_heading():
    leaking = record(control="negative", suite="weak", defense="sgd", metrics={"auc": metric(0.9, 0.01)})
    text = front_page(front_site(*records(), leaking))
    headings = [part.partition("</th>")[0] for part in text.split('class="divider of-suite"')[1:]]
    assert [("weak" in heading, "a control failed" in heading) for heading in headings].count((True, True)) == 1
    assert all("weak" in heading for heading in headings if "a control failed" in heading)


def test_families_come_from_the_guide_and_filters_have_the_values_that_occur():
    guide = Guide(defenses={"dpdr": MethodWords(summary="s", family="two blocks")})
    text = front_page(front_site(*records(), guide=guide))
    (family,) = re.findall(r'<select name="family".*?</select>', text)
    assert re.findall(r"<option[^>]*>([^<]+)", family) == ["all", "other", "two blocks"]
    (epsilon,) = re.findall(r'<select name="epsilon".*?</select>', text)
    assert re.findall(r"<option[^>]*>([^<]+)", epsilon) == ["all", "3", "none proved"]


def test_text_of_records_is_no_markup_and_in_no_link():
    made = []
    for name in HOSTILE:
        task = {"data": name, "model": name, "batch": 64}
        made.append(record("utility", defense=name, task=task))
        made.append(record(defense=name, attack=name, suite=name, task=task, requires=requires(name)))
    text = front_page(front_site(*made))
    # The page's own scripts and style apart, no tag comes from a record.
    body = re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.DOTALL)
    tags = set(re.findall(r"<([a-z0-9]+)", body))
    assert "script" not in tags and "style" not in tags
    assert "<script>alert" not in text and html.escape(HOSTILE[0]) in text
    for target in re.findall(r'href="([^"]*)"', body):
        assert re.fullmatch(r"#[\w-]+|(?:[\w-]+/)*(?:index\.html|board\.\w+)", target), target
    assert embedded(text)


def test_without_a_row_the_page_says_so():
    failed = record(status="failed", reason="OSError: no space")
    text = front_page(front_site(failed))
    assert "Nothing could be measured" in text and "failed or are not" in text


def test_equal_sites_have_equal_pages():
    assert front_page(front_site(*records())) == front_page(front_site(*reversed(records())))


def test_a_degraded_attack_is_said_to_be_so_beside_the_images_it_found():
    noiseless = {"noise_multiplier": 0.0, "claim": claim(None)}
    for flags in (("degraded",), ()):
        weak = record("reconstruction", attack="dlg", flags=flags, **noiseless)
        text = front_page(front_site(weak, record("utility", **noiseless)))
        assert (">mean image 11.0, attack degraded<" in text) == bool(flags) and "mean image 11.0" in text


def test_a_bound_of_another_relation_than_a_finite_claim_stands_beside_no_infinite_claim():
    bound = metric(2.0, n=100, detail={"relation": "add_remove", "delta": 1e-5})
    for finite, words in ((claim(3.0, relation="replace_one"), "no claim for it"), (claim(None), "claim ∞")):
        text = front_page(
            front_site(record("canaries", attack="dirac", metrics={"canary_epsilon": bound}, claim=finite))
        )
        assert [w for w in ("no claim for it", "claim ∞") if w in text] == [words]


def test_a_record_that_several_rows_share_is_counted_once():
    trainings = [record(task={"data": "mnist", "model": "cnn", "epochs": epochs}) for epochs in (1, 2)]
    site = front_site(*trainings, record("reconstruction"))
    assert len(site.rows) == 2 and all(len(row.row.records) == 2 for row in site.rows)
    assert "<dt>records</dt><dd>3</dd>" in front_page(site)
