"""The static site: its links, its files, what a rebuild removes, and what it refuses."""

import json
import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import PurePosixPath
from threading import Thread

import pyarrow.parquet
import pytest

from leakbench.leaderboard.board.table import Board, BoardError
from leakbench.leaderboard.exports.tidy import tables
from leakbench.leaderboard.records.fields import Reported
from leakbench.leaderboard.records.folder import arrays_key
from leakbench.leaderboard.records.record import MethodUsed, RecordError, write
from leakbench.leaderboard.site import files, links
from leakbench.leaderboard.site.build import build_site
from leakbench.leaderboard.site.files import LIST
from leakbench.leaderboard.site.portable_board import PortableCopies
from leakbench.leaderboard.site.site import SubmissionOnSite
from leakbench.leaderboard.site.sources import Sources, read_sources
from leakbench.leaderboard.site.submissions import SubmissionsRead
from leakbench.leaderboard.site.suites import suites_of
from leakbench.leaderboard.submissions.rows import NamedRecords
from leakbench.leaderboard.submissions.tiers import tier_of

from ..submissions.declarations import declaration
from .conftest import GUIDE, PUBLICATION, content, pages


def broken(out):
    """Links of a site that lead nowhere: to no file, outside of the site, or to no id of a page."""
    site = pages(out)
    lost = []
    for path, page in site.items():
        for link in page.links:
            target, _, place = link.partition("#")
            name = os.path.normpath(PurePosixPath(path).parent / target) if target else path
            if name.startswith("..") or not (out / name).is_file() or (place and place not in site[name].ids):
                lost.append(f"{path} -> {link}")
    return lost


def row_of(out, suite, defense):
    """Path of the page of a row, and its numbers."""
    for path in out.glob("rows/*/row.json"):
        tree = json.loads(path.read_text())
        if (tree["suite"], tree["defense"]["name"]) == (suite, defense):
            return path.parent, tree
    raise AssertionError(f"no row of {defense}")


def test_every_link_leads_to_a_file_and_a_place_on_it(site, some):
    out = site(some())
    assert not broken(out)
    for kind, count in {"suites": 2, "defenses": 3, "attacks": 2, "rows": 4}.items():
        assert len(list(out.glob(f"{kind}/*/index.html"))) == count, kind


def test_ids_of_a_page_are_unique_and_nothing_is_loaded_from_elsewhere(site, some):
    for path, page in pages(site(some())).items():
        assert not [name for name, count in Counter(page.ids).items() if count > 1], path
        assert all(load.startswith(("data:", "../")) for load in page.loads), path
        policy = page.content.partition("Content-Security-Policy")[2].partition(">")[0]
        assert "default-src 'none'" in policy and "http" not in policy and "unsafe-eval" not in policy


def test_plots_of_all_suites_share_one_script(site, some):
    out = site(some())
    page = (out / links.suite_page("quick")).read_text()
    assert '<script src="../../vega.js"></script>' in page and len(page) < 400_000
    assert not pages(out)[links.suite_page("other")].loads  # a single record is no plot
    assert (out / "vega.js").stat().st_size > 500_000


def test_equal_records_give_equal_bytes(site, some):
    first, second = content(site(some(), "one")), content(site(some()[::-1], "two"))
    assert first == second


def test_a_rebuild_removes_stale_pages_and_nothing_else(site, some, tmp_path):
    out = site(some())
    gone, _ = row_of(out, "other", "dp_sgd")
    (out / "CNAME").write_text("board.example")
    (out / "rows" / "mine").mkdir()
    site([record for record in some() if record.suite == "quick"])
    assert not gone.exists() and not (out / "suites/other").exists()
    assert (out / "CNAME").is_file() and (out / "rows/mine").is_dir()
    listed = set(json.loads((out / LIST).read_text())["files"])
    assert listed == set(content(out)) - {LIST, "CNAME"}


def test_a_suite_may_have_records_of_submissions_alone(record, tmp_path):
    published, foreign = record(), record(suite="other", defense="eve/x")
    sources = Sources(
        records=(published,),
        folders={arrays_key(one): tmp_path / "records" for one in (published, foreign)},
        manifests=(),
        outputs=(),
        submitted={"eve/1": NamedRecords((foreign,), ())},
    )
    suites = suites_of(sources, sources.board, PortableCopies())
    assert {suite.name: [row.defense.name for row in suite.board.rows] for suite in suites} == {
        "quick": ["dp_sgd"],
        "other": ["eve/x"],
    }


def test_rows_of_two_submissions_with_a_record_of_one_id_have_their_own_submission(record):
    # Cells at a suite's own seeds have the same id in every submission.
    first, second = (
        replace(record(), defense=MethodUsed(name=f"{who}/dp_sgd", settings={})) for who in ("anna", "bob")
    )
    owners = {
        (one.defense.name, one.id): SubmissionOnSite(
            handle=who, digest="d", declaration=declaration(handle=who), tier=tier_of(())
        )
        for who, one in (("anna", first), ("bob", second))
    }
    read = SubmissionsRead((), {}, {}, {}, owners)
    rows = [row for one in (first, second) for row in Board.from_records([one]).rows]
    assert first.id == second.id and [read.owner(row) for row in rows] == list(owners.values())


def test_equal_files_are_not_written_again(site, some):
    out = site(some())
    times = {path: path.stat().st_mtime_ns for path in out.rglob("index.html")}
    site(some())
    assert times == {path: path.stat().st_mtime_ns for path in out.rglob("index.html")}


def test_a_row_keeps_its_page_when_a_seed_and_an_attack_are_added(site, some, record):
    before = {path.name for path in site(some((0,))).glob("rows/*")}
    more = [record(defense="dp_sgd", attack="loss_threshold", seed=0)]
    out = site([*some((0, 1, 2)), *more])
    assert {path.name for path in out.glob("rows/*")} == before


def test_the_page_of_a_row_has_every_number_of_its_records(site, some):
    records = some()
    out = site(records)
    folder, tree = row_of(out, "quick", "dp_sgd")
    text = pages(out)[f"{folder.relative_to(out)}/index.html"].text
    own = [r for r in records if r.suite == "quick" and r.defense.name == "dp_sgd"]
    assert all(one.id in text for one in own)
    assert "0.535" in text and "0.555" in text  # means over seeds 0 and 1 of rmia, and of lira
    assert "add remove" in text and "self-reported" in text and folder.name in text
    assert tree["id"] == folder.name and tree["auc"]["attack"] == "lira" and len(tree["attacks"]) == 3


def test_a_proved_bound_is_beside_the_claim_of_its_row_rounded_down_everywhere(site, record, metric):
    detail = {"method": "test", "relation": "replace_one", "delta": 1e-5, "claimed": 6.7}
    bound = metric(2.378, n=1000, reason="a low end", detail=detail)
    out = site([record("canaries", attack="dirac", metrics={"canary_epsilon": bound}, seed=seed) for seed in (0, 1)])
    texts = {path: page.decode() for path, page in content(out).items() if path.endswith(".html")}
    (page,) = [text for path, text in texts.items() if path.startswith("rows/")]
    assert "2.37 for replace one at delta 1e-05 (claim 6.7), by dirac, 2 seeds; from canaries: the least" in page
    assert "holds with a confidence of 0.95" in page and not any("2.38" in text for text in texts.values())


def test_a_row_of_which_nothing_is_proved_says_why(site, record):
    (page,) = [text for path, text in content(site([record()])).items() if re.fullmatch("rows/.*html", path)]
    assert "n/a: no attack was run whose pairs or canaries prove a bound" in page.decode()


def test_a_number_that_saturates_says_so_on_top_of_its_row_too(site, record, metric):
    out = site([record("reconstruction", metrics={"psnr": metric(120.0), "psnr_floor": metric(11.0)})])
    (page,) = [text for path, text in content(out).items() if path.startswith("rows/") and path.endswith(".html")]
    assert re.search(r'class="facts">.*≥120\.0.*?</dl>', page.decode(), re.DOTALL)


def test_a_papers_figure_stands_beside_ours(site, some):
    from dataclasses import replace

    reported = (Reported(metric="accuracy", value=0.75, source="Table 2"),)
    records = [
        replace(record, reported=reported) if record.kind == "utility" and record.defense.name == "dpdr" else record
        for record in some()
    ]
    out = site(records)
    folder, _ = row_of(out, "quick", "dpdr")
    text = pages(out)[f"{folder.relative_to(out)}/index.html"].text
    assert "0.75" in text and "+0.050" in text and "Table 2" in text


def test_failed_and_skipped_cells_are_on_the_page_of_the_row(site, some, record):
    failed = record(defense="dp_sgd", attack="rmia", seed=5, status="failed", reason="it ran out of memory")
    out = site([*some(), failed])
    folder, _ = row_of(out, "quick", "dp_sgd")
    for page in (f"{folder.relative_to(out)}/index.html", "defenses/dp_sgd/index.html", "attacks/rmia/index.html"):
        assert "it ran out of memory" in pages(out)[page].text, page


def test_downloads_have_the_numbers_of_the_board(site, some, tmp_path):
    out = site(some())
    board = Board.from_folder(tmp_path / "results")
    lines = pyarrow.parquet.read_table(out / "board.parquet").to_pylist()
    assert lines == tables(board)["record"]
    tree = json.loads((out / "board.json").read_text())
    assert [row["auc"] for row in tree["rows"]] == [
        row["auc"] for row in json.loads(json.dumps(board.to_dict()))["rows"]
    ]
    assert (out / "board.csv").read_text() == board.to_csv()
    rows = json.loads((out / "suites/quick/suite.json").read_text())["rows"]
    assert {row["suite"] for row in rows} == {"quick"} and len(rows) == 3


def test_folders_with_records_at_any_depth_make_one_site(some, tmp_path):
    for i, record in enumerate(some()):
        write(record, tmp_path / "published" / record.suite / ("" if i % 2 else "more") / "records")
    build_site([tmp_path / "published"], tmp_path / "site", guide=GUIDE, publication=PUBLICATION)
    assert len(list(tmp_path.glob("site/rows/*"))) == 4
    assert len(read_sources([tmp_path / "published"]).folders) == len(some())


HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "../../../../etc/passwd",
    "{{ 7 * 7 }}",
    "javascript:alert(1)",
    "con\x00trol",
    "\ud800 half",
    "ßß",
    "n" * 400,
    "a/b",
    "a\\b",
    "x" * 70 + "1",
    "x" * 70 + "2",
    "DP_SGD",
    " ",
    ".",
)


def test_a_name_cannot_take_the_page_of_another():
    names = ["DP-SGD", links.slug("DP-SGD"), "dp-sgd", "y" * 70, links.slug("y" * 70), *HOSTILE]
    assert len(set(map(links.slug, names))) == len(set(names))
    # Windows keeps these names for devices.
    assert not {links.slug(name) for name in ("con", "CON", "nul", "com1", "lpt9")} & {"con", "nul", "com1", "lpt9"}


def test_suites_whose_pages_would_be_one_are_refused(site, record):
    with pytest.raises(BoardError, match="suites must differ without their paths"):
        site([record(), record(suite="/home/somebody/quick")])


def test_names_of_strangers_are_escaped_and_stay_inside(site, some, record, tmp_path):
    records = some((0,))
    for name in HOSTILE:
        fields = {"defense": name, "attack": name, "suite": name, "flags": (f"unverified_{name}",)}
        records.append(record(**fields))
        records.append(record("utility", status="failed", reason=name, **{**fields, "attack": None}))
    out = site(records)
    assert not broken(out)
    for path, page in pages(out).items():
        assert "img" not in page.tags and "<script>alert" not in page.content, path
        assert all(not link.startswith(("javascript", "http", "/")) for link in page.links), path
        assert page.content.count("</script>") <= page.content.count("<script"), path
        assert "49" not in page.text or "{{ 7" not in page.text.replace("{{ 7 * 7 }}", "")
    assert len(list(out.glob("defenses/*"))) == 3 + len(HOSTILE)
    # Nothing was written beside the results and the site.
    assert {path.name for path in tmp_path.iterdir()} == {"results", "site"}
    assert all(set(path) <= set("abcdefghijklmnopqrstuvwxyz0123456789-_./") for path in content(out))


def test_no_page_has_a_path_of_the_machine(site, some, record, tmp_path):
    data = f"folder:{tmp_path}/birds"
    own = {
        "defense": MethodUsed(name=f"{tmp_path}/mine.py:half", settings={"file": f"{tmp_path}/settings.toml"}),
        "task": {"data": data, "model": "mlp", "batch": 64},
    }
    kept = record(**own)
    failed = record(seed=1, status="failed", reason=f"cannot read '{tmp_path}/a b/scores.npz'", **own)
    out = site([*some(), kept, failed])
    assert not [name for name, text in content(out).items() if str(tmp_path).encode() in text]
    assert not broken(out)
    folder, tree = row_of(out, "quick", "mine.py:half")
    assert tree["task"]["data"] == "folder:birds"
    # The id is that of the records, as in every export.
    assert folder.name in {line["row_id"] for line in tables(Board.from_folder(tmp_path / "results"))["record"]}


@pytest.mark.parametrize(
    "where", ["a file", "other files", "a page in the way", "a link", "a list that leads elsewhere", "a deep list"]
)
def test_a_folder_that_is_no_site_is_refused(site, some, tmp_path, where):
    out, other = tmp_path / "site", tmp_path / "other"
    other.mkdir()
    (other / "kept.txt").write_text("kept")
    if where == "a file":
        out.write_text("")
    elif where == "other files":
        out.mkdir()
        (out / "notes.txt").write_text("mine")
    elif where == "a link":
        out.symlink_to(other)
    else:
        site(some((0,)))
        if where == "a page in the way":
            row, _ = row_of(out, "other", "dp_sgd")
            listed = json.loads((out / LIST).read_text())["files"]
            kept = [name for name in listed if row.name not in name]
            (out / LIST).write_text(json.dumps({"files": kept}))
        else:
            (out / LIST).write_text("[" * 100_000 if where == "a deep list" else '{"files": ["../other/kept.txt"]}')
    with pytest.raises(RecordError, match=r"out must be|out must hold|symbolic link|no list of a site's files"):
        site(some())
    assert (other / "kept.txt").read_text() == "kept" and not (other / LIST).exists()


@pytest.mark.skipif(files.fcntl is None, reason="no locks here")
def test_builds_into_one_folder_take_turns(tmp_path, monkeypatch):
    out, whole, others = tmp_path / "site", files.write_bytes, []
    first, second = ({f"rows/{name}/index.html": b"", "index.html": name.encode()} for name in "ab")

    def interrupted(path, content):
        if not others:
            others.append(Thread(target=files.write_site, args=(second, out)))
            others[0].start()
            others[0].join(0.5)
        return whole(path, content)

    monkeypatch.setattr(files, "write_bytes", interrupted)
    files.write_site(first, out)
    others[0].join()
    assert {name: text for name, text in content(out).items() if name != LIST} == second


def test_without_records_nothing_is_written(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecordError, match="no records in"):
        build_site([tmp_path / "empty"], tmp_path / "site", guide=GUIDE, publication=PUBLICATION)
    assert not (tmp_path / "site").exists()


def test_a_record_in_two_folders_is_refused(some, tmp_path):
    for folder in ("one", "two"):
        write(some()[0], tmp_path / folder / "records")
    with pytest.raises(ValueError, match="must differ in id"):
        build_site([tmp_path / "one", tmp_path / "two"], tmp_path / "site", guide=GUIDE, publication=PUBLICATION)


def test_a_very_large_suite_is_its_table_and_says_so(site, record, monkeypatch):
    monkeypatch.setattr("leakbench.leaderboard.site.suites.MOST_ROWS", 3)
    records = [record(defense="dp_sgd", defense_settings={"clip_norm": float(i)}) for i in range(4)]
    out = site(records)
    page = pages(out)["suites/quick/index.html"]
    assert "This suite has 4 rows of 4 records" in page.text and "matrix" not in page.ids and not page.loads
    assert not (out / "vega.js").exists() and not broken(out)


def test_of_many_suites_the_smallest_have_plots_and_the_others_say_so(site, record, monkeypatch):
    monkeypatch.setattr("leakbench.leaderboard.site.suites.MOST_DRAWN", 3)
    records = [
        record(suite=suite, defense_settings={"clip_norm": float(i)})
        for suite in "abc"
        for i in range(1 + (suite == "a"))
    ]
    shown = pages(site(records))
    left_out = {suite: "more than 3 records" in shown[f"suites/{suite}/index.html"].text for suite in "abc"}
    assert left_out == {"a": True, "b": False, "c": False}


def test_the_page_of_a_defense_has_its_rows_of_all_suites_and_its_description(site, some):
    page = pages(site(some()))["defenses/dp_sgd/index.html"]
    assert "Clips and adds noise." in page.text and "family: bound" in page.text and "Abadi et al." in page.text
    assert {"../../suites/quick/index.html", "../../suites/other/index.html"} <= set(page.links)
    assert "lira" in page.text and "rmia" not in page.text  # only the strongest


def test_the_page_of_an_attack_has_every_defense(site, some):
    page = pages(site(some()))["attacks/rmia/index.html"]
    assert sum("rows/" in link for link in page.links) == 3
    assert page.text.count("strongest of its kind") == 1  # of the facts: lira is, on all of them
