"""`leakbench audit` as a user calls it: verdicts, exit codes, rules, reports, and what is refused beforehand."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

from leakbench.attacks.core import balanced_halves
from leakbench.audit.cli.app import main
from leakbench.benchmarks import models
from leakbench.leaderboard.page.shared_update import build_update_report
from leakbench.leaderboard.records.record import RecordError, read_all

from ...parameters import subtests


@pytest.fixture(scope="module")
def folder(overfitted, tmp_path_factory):
    return overfitted.write(tmp_path_factory.mktemp("audit"))


@pytest.fixture
def leakbench(capsys, folder, monkeypatch):
    monkeypatch.chdir(folder)

    def run(*arguments):
        with pytest.raises(SystemExit) as exited:
            main(["audit", *arguments])
        out, err = capsys.readouterr()
        return exited.value.code, out, err

    return run


FILES = ("model", "model.safetensors", "--model", "mlp", "--members", "members.npz", "--non-members", "non_members.npz")
WATCHED = ("transcript", "none", "--checkpoint", *FILES[1:])


@pytest.mark.long
def test_an_overfitted_model_refutes_a_small_claim(leakbench, tmp_path):
    code, out, err = leakbench(
        *FILES, "--split", "random", "--claim", "epsilon=0.8", "--no-gradients", "--out", str(tmp_path / "report")
    )
    assert code == 1
    assert out.startswith("claim refuted: The claim is refuted: ")
    assert "claim:   allows 1.60: refuted" in out
    page = (tmp_path / "report" / "index.html").read_text()
    assert "<h1>Claim refuted</h1>" in page
    assert f"report: {tmp_path / 'report' / 'index.html'}" in err
    told = json.loads((tmp_path / "report" / "audit.json").read_text())
    assert told["epsilon"]["refutes"] is True
    scores = pd.read_parquet(tmp_path / "report" / "scores.parquet")
    assert np.count_nonzero(scores["member"].to_numpy()) == 600
    assert len(scores) == 1200
    assert scores.loc[scores["member"], "name"].str.startswith("members:").all()
    records = read_all(tmp_path / "report")
    assert {record.kind for record in records} == {"utility", "membership"}
    assert all(record.claim is not None and record.claim.epsilon is None for record in records)


@subtests("named", ["feature_names = ['f0', 'f1', 'f2']", "feature_names_in_ = np.array(['f0', 'f1', 'f2'])"])
def test_a_table_has_the_columns_that_a_model_names(leakbench, tmp_path, named):
    draw = np.random.default_rng(0)
    for name in ("m", "n"):
        columns = {f"f{i}": draw.normal(size=40) for i in (1, 0, 2)}
        pd.DataFrame(columns | {"label": np.arange(40) % 2}).to_parquet(tmp_path / f"{name}.parquet")
    (tmp_path / "net.py").write_text(
        "import numpy as np\n"
        "from torch import nn\n"
        "def build(classes=2):\n"
        "    model = nn.Sequential(nn.Linear(3, classes))\n"
        f"    model.{named}\n"
        "    return model\n",
        encoding="utf-8",
    )
    save_file({"0.weight": torch.randn(2, 3), "0.bias": torch.zeros(2)}, tmp_path / "net.safetensors")
    given = {name: str(tmp_path / name) for name in ("net.safetensors", "net.py", "m.parquet", "n.parquet")}
    code, _, err = leakbench(
        *("model", given["net.safetensors"], "--model", f"{given['net.py']}:build", "--trust-code"),
        *("--members", given["m.parquet"], "--non-members", given["n.parquet"]),
    )
    assert code == 2 and "in their order, and column 1 is f1 instead of f0" in err


def test_without_a_random_split_nothing_is_called_an_epsilon(leakbench):
    plain = (*FILES, "--no-gradients", "--attacks", "loss_threshold")
    code, out, _ = leakbench(*plain, "--claim", "epsilon=0.8", "--json")
    told = json.loads(out)
    assert code == 0
    assert told["epsilon"]["split"] == "unknown"
    assert told["epsilon"]["refutes"] is False
    assert "pass --split random" in told["not_tested"][-1]
    assert told["attacks"][0]["metrics"]["epsilon_lower"]["value"] is None
    # Whoever asks the weakest attack alone is told what was left out.
    assert any("modified_entropy" in one and "left out by --attacks" in one for one in told["not_tested"])
    code, _, err = leakbench(*plain, "--fail-if", "epsilon_lower>0")
    assert code == 1
    assert "the split is not said to be random" in err


def test_describe_computes_nothing_and_says_what_would_run(leakbench, monkeypatch):
    monkeypatch.setattr(
        "leakbench.audit.external.model.loaded_model.read_weights", lambda *_, **__: pytest.fail("the model was read")
    )
    code, out, _ = leakbench(*FILES, "--describe")
    assert code == 0
    assert "members: 600 of members.npz" in out
    assert "runs  loss_threshold" in out
    assert "skips lira: needs --shadows 64 --train FILE.py:FUNCTION --trust-code" in out
    assert "smallest leak that would show in four audits of five: AUC 0.56" in out


@pytest.mark.long
def test_the_preflight_stops_an_audit_that_would_mean_nothing(leakbench):
    for describe in ((), ("--describe",)):
        code, out, err = leakbench(*FILES[:6], "--non-members", "members.npz", *describe)
        assert code == 2
        assert out == ""
        assert "stop: members and non-members have the very same examples" in err


TRAIN = """
from leakbench.benchmarks import models
import torch

def train(inputs, labels, *, seed):
    model = models.build('mlp', input_shape=(1, 8, 8), classes=10, seed=seed).to(inputs.device)
    steps = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(10):
        steps.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        steps.step()
    return model
"""


@pytest.mark.long
def test_shadow_models_of_an_owners_function(leakbench, tmp_path, folder):
    (folder / "train.py").write_text(TRAIN, encoding="utf-8")
    asked = (*FILES, "--shadows", "4", "--train", "train.py:train", "--attacks", "lira", "--no-gradients")
    code, _, err = leakbench(*asked)
    assert code == 2
    assert "pass --trust-code if you trust it" in err
    code, first, err = leakbench(*asked, "--trust-code", "--out", str(tmp_path / "report"), "--json")
    assert code == 0
    assert "shadow model 4 of 4" in err
    assert len(list((tmp_path / "report" / "shadows").iterdir())) == 4
    found = json.loads(first)["attacks"][0]
    # All that were trained are used, though the attack's own default is another number.
    assert found["settings"]["shadows"] == 4 and 0 < found["metrics"]["auc"]["value"] < 1
    assert json.loads(first)["data"]["shadows"]["models"] == 4
    # What was trained is read again, and gives the same.
    (folder / "train.py").touch()
    _, again, _ = leakbench(*asked, "--trust-code", "--out", str(tmp_path / "report"), "--json")
    assert json.loads(again)["attacks"][0]["metrics"] == json.loads(first)["attacks"][0]["metrics"]


@pytest.mark.long
def test_a_bank_that_somebody_trained_elsewhere(leakbench, overfitted, tmp_path):
    both = zip(overfitted.members, overfitted.non_members, strict=True)
    inputs, labels = (torch.cat(parts) for parts in both)
    halves = balanced_halves(len(inputs), 6, torch.Generator().manual_seed(0))
    answers = []
    for number, half in enumerate(halves):
        model = models.build("mlp", input_shape=(1, 8, 8), classes=10, seed=number)
        steps = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(40):
            steps.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs[half]), labels[half]).backward()
            steps.step()
        answers.append(model(inputs).detach())
    save_file({"logits": torch.stack(answers), "trained_on": halves}, tmp_path / "bank.safetensors")
    asked = (*FILES, "--no-gradients", "--attacks", "lira", "--json", "--bank", str(tmp_path / "bank.safetensors"))
    code, out, err = leakbench(*asked)
    told = json.loads(out)
    assert code == 0, err
    assert told["attacks"][0]["settings"]["shadows"] == 6
    assert 0 < told["attacks"][0]["metrics"]["auc"]["value"] < 1
    assert "bank.safetensors, SHA-256" in told["data"]["shadows"]["source"]
    code, _, err = leakbench(*asked, "--shadows", "4", "--train", "a.py:b", "--trust-code")
    assert code == 2 and "--bank is instead of --shadows and --train" in err
    # One example less, and nobody can say whose answers these are.
    save_file(
        {"logits": torch.stack(answers)[:, 1:].contiguous(), "trained_on": halves[:, 1:].contiguous()},
        tmp_path / "bank.safetensors",
    )
    code, _, err = leakbench(*asked)
    assert code == 2 and "600 members, then 600 non-members" in err


def test_scores_without_a_model(leakbench, tmp_path):
    draw = np.random.default_rng(0)
    table = pd.DataFrame({"member": np.arange(2000) < 1000, "score": draw.normal(size=2000)})
    table.loc[table["member"], "score"] += 1.5
    table.to_csv(tmp_path / "scores.csv", index=False)
    code, out, _ = leakbench("scores", str(tmp_path / "scores.csv"), "--split", "random", "--claim", "epsilon=0.1")
    assert code == 1
    assert "score has an AUC of 0.8" in out or "score was right in" in out
    code, out, err = leakbench("scores", str(tmp_path / "scores.csv"), "--fail-if", "score:auc.high<0.9")
    assert code == 1
    assert "broken: score:auc.high<0.9" in err


@subtests(
    ("arguments", "told"),
    [
        (("model", "model.safetensors", *FILES[4:]), "--model must be given"),
        (FILES[:4], "--members and --non-members must be given"),
        ((*FILES, "--split", "sorted"), "--split must be random or unknown"),
        ((*FILES, "--claim", "1"), "--claim must be KEY=VALUE"),
        ((*FILES, "--attacks", "lyra"), "did you mean 'lira'"),
        ((*FILES, "--attacks", "likelihood_ratio"), "attacks no finished model: it needs"),
        ((*FILES, "--attacks", "loss_trace"), "use leakbench audit transcript DIR"),
        ((*FILES, "--fail-if", "auc=1"), "--fail-if must be"),
        ((*FILES, "--shadows", "4"), "--shadows and --train go together"),
        ((*FILES, "--shadows", "3", "--train", "a.py:b", "--trust-code"), "even number"),
        ((*FILES, "--preprocess", "mean"), "--preprocess must be"),
        ((*FILES, "--level", "2"), r"level must be in (0, 1)"),
        ((*FILES, "--data", "digits"), "--data and --split-file go together"),
        ((*FILES, "--out", "members.npz"), "--out must be a folder"),
        (
            (*FILES, "--scores", "members.npz"),
            "has no --scores, which is of leakbench audit scores",
        ),
        (("model", "model.safetensors", "--model", "a.py:b", *FILES[4:]), "pass --trust-code"),
        (("model", "none.safetensors", *FILES[2:]), "none.safetensors"),
        ((*FILES, "--out", "members.npz/report"), "members.npz is none"),
        (
            ("scores", "s.csv", "--out", "report"),
            "has no --out, which is of leakbench audit model",
        ),
        (("scores", "s.csv"), "scores must be a file that can be read"),
        (("scores",), "FILE"),
        (("scorse", "s.csv"), "no audit named 'scorse'; did you mean 'scores'?"),
        ((*FILES, "--lr", "0"), "leakbench audit model has no --lr, which is of leakbench audit update"),
        (("model", "none.safetensors", *FILES[2:], "--describe"), "there is no none.safetensors"),
        (("model", "model.safetensors", "--model", "mlpp", *FILES[4:], "--describe"), "did you mean 'mlp'"),
        ((*WATCHED, "--claim", "epsilon=3", "--describe"), "a transcript must be a folder"),
        (("model", "model.safetensors", "--model", "mlpp", *FILES[4:]), "did you mean 'mlp'"),
    ],
)
def test_mistakes_are_one_sentence_before_any_compute(leakbench, arguments, told):
    code, out, err = leakbench(*arguments)
    assert code in (2, 3)
    assert out == ""
    assert told in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.fixture(scope="module")
def shared(overfitted, folder):
    """The mean gradient of eight public digits, at weights before any training."""
    import torch
    from safetensors.torch import save_file

    from leakbench.benchmarks import models

    model = models.build("mlp", input_shape=(1, 8, 8), classes=10, seed=0)
    inputs, labels = overfitted.public
    np.savez(folder / "batch.npz", x=inputs[:20].numpy(), y=labels[:20].numpy())
    np.savez(folder / "known.npz", x=inputs[20:420].numpy(), y=labels[20:420].numpy())
    save_file(model.state_dict(), str(folder / "before.safetensors"))
    for size, name in ((1, "one"), (8, "eight")):
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs[:size]), labels[:size]).backward()
        gradient = {
            key: parameter.grad.clone() for key, parameter in model.named_parameters() if parameter.grad is not None
        }
        save_file(gradient, str(folder / f"{name}.safetensors"))
    with torch.no_grad():
        after = {key: parameter - 0.1 * gradient[key] for key, parameter in model.named_parameters()}
    save_file(after, str(folder / "after.safetensors"))
    return inputs, labels


UPDATE = ("update", "--checkpoint", "before.safetensors", "--model", "mlp", "--public", "known.npz")


@pytest.mark.long
def test_the_image_behind_one_gradient_is_reconstructed(leakbench, shared, tmp_path):
    code, out, _ = leakbench(*UPDATE, "one.safetensors", "--batch-size", "1", "--out", str(tmp_path))
    assert code == 0
    assert "bias_division: 1 input(s) reconstructed (ok, 1 of them proved to be in the batch; they leave " in out
    with np.load(tmp_path / "reconstructions.npz") as found:
        np.testing.assert_allclose(found["bias_division"], shared[0][:1].numpy(), atol=1e-6)
    assert (tmp_path / "bias_division_0.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "index.html").read_text()
    assert "1 input of the batch reconstructed and proved to be in it (bias_division)" in page
    assert " · proved" in page
    assert page.count("data:image/png;base64") == 3  # and r_gap's, and a search's at the label that was found
    assert "pass --attacks with their names" in page
    assert "| bias\\_division |" in (tmp_path / "SUMMARY.md").read_text()
    told = json.loads((tmp_path / "update.json").read_text())
    (named,) = [one for one in told["attacks"] if one["kind"] == "labels"]
    assert named["labels"] == {str(int(shared[1][0])): 1}


@pytest.mark.parametrize(
    ("asked", "pictures"),
    [
        pytest.param(
            ("one.safetensors", "--batch-size", "1", "--attacks", "bias_division,label_recovery"),
            1,
            marks=pytest.mark.long,
        ),
        (("eight.safetensors", "--batch-size", "8", "--candidates", "batch.npz", "--attacks", "gaussian_others"), 0),
    ],
)
@pytest.mark.usefixtures("shared")
def test_an_update_is_audited_on_an_accelerator_as_on_the_cpu(
    accelerator, leakbench, tmp_path, monkeypatch, asked, pictures
):
    found = []
    for device in (torch.device("cpu"), accelerator):
        monkeypatch.setattr("leakbench.audit.run.harness.pick_device", lambda name, device=device: device)
        out = tmp_path / device.type
        code, _, err = leakbench(*UPDATE, *asked, "--out", str(out))
        assert code == 0, err
        assert (out / "index.html").read_text(encoding="utf-8").count("data:image/png;base64") == pictures
        found.append(json.loads((out / "update.json").read_text(encoding="utf-8")))
    on_cpu, there = found
    assert there["verdict"] == on_cpu["verdict"]
    assert {attack["why_not"] for attack in on_cpu["attacks"]} == {""}
    for one, other in zip(there["attacks"], on_cpu["attacks"], strict=True):
        assert (one["name"], one["kind"], one["why_not"]) == (other["name"], other["kind"], "")
        scores = [[candidate["p_value"] for candidate in attack.get("candidates", ())] for attack in (one, other)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-3)


@pytest.mark.long
def test_a_model_is_audited_on_an_accelerator_with_shadow_models(accelerator, leakbench, tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    monkeypatch.setattr("leakbench.audit.run.harness.pick_device", lambda name: accelerator)
    code, out, err = leakbench(
        *(*FILES, "--population", "public.npz", "--attacks", "lira,shadow_classifier,loss_threshold"),
        *("--shadows", "4", "--train", f"{tmp_path}/train.py:train", "--trust-code", "--no-gradients", "--json"),
    )
    assert code == 0, err
    told = json.loads(out)
    assert {attack["name"]: attack["why_not"] for attack in told["attacks"]} == {
        name: "" for name in ("lira", "shadow_classifier", "loss_threshold")
    }
    assert told["data"]["shadows"]["models"] == 4


@subtests("form", [("eight.safetensors",), ("after.safetensors", "--lr", "0.1")])
def test_candidates_of_a_batch_are_told_from_others(leakbench, shared, form):
    asked = ("--batch-size", "8", "--candidates", "batch.npz", "--attacks", "gaussian_others", "--json")
    code, out, _ = leakbench(*UPDATE, *form, *asked)
    assert code == 0
    values = [one["q_value"] for one in json.loads(out)["attacks"][0]["candidates"]]
    assert sum(value <= 0.05 for value in values[:8]) >= 6
    assert sum(value <= 0.05 for value in values[8:]) <= 2


def test_candidates_of_an_update_are_matched_with_public_examples_by_their_columns(leakbench, shared, folder, tmp_path):
    from safetensors.torch import save_file
    from torch import nn

    from leakbench.benchmarks import models

    inputs, labels = shared
    rows = inputs.flatten(1)
    model = models.build("mlp", input_shape=(64,), classes=10, seed=0)
    nn.functional.cross_entropy(model(rows[:2]), labels[:2]).backward()
    gradient = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    save_file(model.state_dict(), str(tmp_path / "before.safetensors"))
    save_file(gradient, str(tmp_path / "update.safetensors"))
    names = [f"p{i}" for i in range(64)]
    table = pd.DataFrame(rows.numpy(), columns=names).assign(label=labels.numpy())
    table[20:].to_parquet(tmp_path / "public.parquet")
    table.iloc[:8][["label", *names[::-1]]].to_parquet(tmp_path / "who.parquet")
    table.iloc[:8].rename(columns={"p3": "other"}).to_parquet(tmp_path / "renamed.parquet")
    asked = ["update", str(tmp_path / "update.safetensors"), "--checkpoint", str(tmp_path / "before.safetensors")]
    asked += [
        "--model",
        "mlp",
        "--batch-size",
        "2",
        "--public",
        str(tmp_path / "public.parquet"),
        "--attacks",
        "gradient_similarity",
    ]
    code, out, _ = leakbench(*asked, "--candidates", str(tmp_path / "who.parquet"), "--json")
    told = json.loads(out)
    assert code == 0 and any("were put into the order of" in note for note in told["notes"])
    p_values = [one["p_value"] for one in told["attacks"][0]["candidates"]]
    assert max(p_values[:2]) < 0.05 and sum(p_values[2:]) / 6 > 0.2
    code, _, err = leakbench(*asked, "--candidates", str(tmp_path / "renamed.parquet"))
    assert code == 2 and "lacks p3 and has other" in err


def test_a_report_names_candidates_and_takes_no_other_files(leakbench, shared, tmp_path):
    asked = ("--batch-size", "8", "--candidates", "batch.npz", "--out", str(tmp_path))
    plain = (*UPDATE, "eight.safetensors", *asked)
    code, out, _ = leakbench(*plain, "--attacks", "gaussian_others")
    assert code == 0
    assert out.startswith("leaks: This update leaks: ")
    page = (tmp_path / "index.html").read_text()
    assert page.count("in the batch</strong>") >= 6
    table = pd.read_parquet(tmp_path / "candidates.parquet")
    told = json.loads((tmp_path / "update.json").read_text())
    rows = told["attacks"][0]["candidates"]
    assert table["q_value_gaussian_others"].tolist() == [one["q_value"] for one in rows]
    assert (
        f"{np.count_nonzero(table['q_value_gaussian_others'].to_numpy() <= 0.05)} of 20 candidates"
        in told["verdict"]["sentence"]
    )
    # Of two attacks each has half of the rate.
    _, out, _ = leakbench(*plain, "--attacks", "gaussian_others,gradient_similarity")
    table = pd.read_parquet(tmp_path / "candidates.parquet")
    least = table[["q_value_gaussian_others", "q_value_gradient_similarity"]].to_numpy().min(axis=1)
    count = np.count_nonzero(least <= 0.025)
    told = json.loads((tmp_path / "update.json").read_text())
    assert f"{count or 'none'} of 20 candidates" in told["verdict"]["sentence"]
    # Page, summary, text and files show of each attack whom the verdict counts.
    between = 0
    page, summary = (tmp_path / "index.html").read_text(), (tmp_path / "SUMMARY.md").read_text()
    for one in told["attacks"]:
        q_values = table[f"q_value_{one['name']}"].to_numpy()
        own = np.count_nonzero(q_values <= 0.025)
        between += np.count_nonzero(q_values <= 0.05) - own
        assert [row["shown"] for row in one["candidates"]] == (q_values <= 0.025).tolist()
        said = f"{own} of 20 candidates shown, at a false discovery rate of 2.5 %"
        assert said in page and said in summary
        assert f"{one['name']}: {own} of 20 candidates shown to have been in it" in out
    assert between > 0, "nobody whom one rate shows and the other does not: the seed tries nothing"
    assert page.count("in the batch</strong>") == sum(
        row["shown"] for one in told["attacks"] for row in one["candidates"]
    )
    (tmp_path / "reconstructions.npz").write_bytes(b"of another")
    with pytest.raises(RecordError, match="is not the file that the audit wrote"):
        build_update_report(tmp_path)
    (tmp_path / "update.json").write_text(json.dumps(told | {"schema": "leakbench-update/1"}))
    with pytest.raises(RecordError, match="must be leakbench-update/4"):
        build_update_report(tmp_path)


def test_a_difference_of_weights_is_named_and_a_last_layer_alone_is_attacked(leakbench, shared, folder):
    from safetensors.torch import load_file, save_file

    before, after = (load_file(str(folder / f"{name}.safetensors")) for name in ("before", "after"))
    save_file({name: after[name] - before[name] for name in after}, str(folder / "difference.safetensors"))
    last = sorted(after)[-2:]
    save_file({name: after[name] for name in last}, str(folder / "last.safetensors"))
    asked = ("--batch-size", "8", "--attacks", "label_recovery,r_gap")
    truth = {str(k): int(v) for k, v in enumerate(np.bincount(shared[1][:8].numpy())) if v}
    code, out, _ = leakbench(*UPDATE, "difference.safetensors", *asked)
    assert code == 0
    assert "note: The update is a difference of weights (after minus before) at a rate of 0.1" in out
    code, out, _ = leakbench(*UPDATE, "last.safetensors", "--lr", "0.1", *asked, "--json")
    told = json.loads(out)
    assert (code, told["attacks"][0]["labels"], told["attacks"][0]["status"]) == (0, truth, "ok")
    assert "; the update lacks " in told["attacks"][1]["why_not"]
    assert told["update"]["convention"]["words"] == "new weights"


ONE = (*UPDATE, "one.safetensors", "--batch-size")


@subtests(
    ("arguments", "told"),
    [
        (ONE[:-1], "--batch-size"),
        (("update", "one.safetensors", "--batch-size", "1"), "--checkpoint"),
        ((*UPDATE[:3], *ONE[7:], "1"), "--model must be given"),
        ((*ONE, "1", "--labels", "a"), "--labels must be class numbers"),
        ((*ONE, "2", "--labels", "1"), "one an example of the batch"),
        ((*ONE, "1", "--noise-multiplier", "1"), "give --clip-norm"),
        ((*UPDATE[:5], *ONE[7:], "1", "--candidates", "batch.npz"), "give --public"),
        ((*UPDATE, "members.npz", "--batch-size", "1"), "members.npz"),
        ((*ONE, "1", "--attacks", "lira"), "no attack on an update"),
        (
            (*ONE, "1", "--claim", "epsilon=1"),
            "has no --claim, which is of leakbench audit model",
        ),
        ((*UPDATE, "before.safetensors", "--batch-size", "1"), "looks like the model's weights; give --lr"),
        (
            (*UPDATE, "before.safetensors", "--batch-size", "1", "--lr", "0.1"),
            "zero everywhere: its weights are those of the checkpoint",
        ),
        (
            (*ONE, "1", "--update-is", "mean"),
            "--update-is must be one of gradient, difference, weights, sum, got 'mean'",
        ),
        ((*ONE, "1", "--weight-decay", "-1"), "--weight-decay must be at least 0"),
        ((*ONE, "1", "--training-mode"), "with batch norms, and it has none"),
        ((*ONE, "1", "--describe"), "leakbench audit update has no --describe"),
        ((*ONE, "1", "--canaries", "c"), "has no --canaries, which is of leakbench audit transcript"),
    ],
)
def test_mistakes_about_an_update_are_one_sentence(leakbench, shared, arguments, told):
    code, out, err = leakbench(*arguments)
    assert code == 2
    assert out == ""
    assert told in err
    assert err.count("\n") == 1


@pytest.mark.long
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_transcript_shows_half_of_the_noise(leakbench, folder, tmp_path, share):
    import torch

    from leakbench import audit
    from leakbench.benchmarks import models

    coins = torch.Generator().manual_seed(0)
    model = models.build("mlp", input_shape=(1, 8, 8), classes=10, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with audit.watch(
        optimizer, tmp_path / "steps", model=model, noise_multiplier=4.0, clip_norm=1.0, expected_batch=60
    ):
        for _ in range(5):
            # Noise alone: batches that happen to hold nobody, which is all that these tests of noise can be told.
            for parameter in model.parameters():
                parameter.grad = share * 4.0 / 60 * torch.randn(parameter.shape, generator=coins)
            optimizer.step()
    stated = "epsilon=3,sampling=poisson,sample_rate=0.1,noise_multiplier=4,steps=5"
    split = ("--split", "random") if share < 1 else ()
    found, out, _ = leakbench(
        *("transcript", str(tmp_path / "steps"), *WATCHED[2:], "--claim", stated), *split, "--no-gradients",
        "--attacks", "loss_threshold", "--json",
    )  # fmt: skip
    told = json.loads(out)
    # Two judges of one claim share the level; of a split that nobody calls random there is one.
    assert told["epsilon"]["level"] == told["transcript"]["level"] == (0.975 if share < 1 else 0.95)
    assert any("noise" in sentence for sentence in told["transcript"]["refuted"]) == (share < 1)
    # The finished model is another one than that of these steps, which a transcript says, and which refutes nothing.
    assert told["transcript"]["problems"]
    if share < 1:
        assert found == 1
        assert told["verdict"]["word"] == "claim refuted"
        assert told["transcript"]["word"] == "violation"
    else:
        assert told["transcript"]["word"] == "no verdict"
        assert told["verdict"]["word"] != "claim refuted"
        assert "The transcript allows no verdict" in told["verdict"]["sentence"]
    # Without the model the noise is judged all the same, at the whole level.
    alone, out, _ = leakbench("transcript", str(tmp_path / "steps"), "--claim", stated, "--json")
    told = json.loads(out)
    assert alone == (1 if share < 1 else 0)
    assert told["verdict"]["word"] == ("violation" if share < 1 else "no violation found")
    assert told["verdict"]["level"] == 0.95
    _, out, _ = leakbench("transcript", str(tmp_path / "steps"), "--claim", stated)
    assert out.startswith("violation: " if share < 1 else "no violation found: ")
    assert "not tested: noise on coordinates without a gradient" in out


@subtests(
    ("arguments", "told"),
    [
        (WATCHED, "a transcript is held against a claim; give --claim"),
        ((*FILES, "--canaries", "c.safetensors"), "which is of leakbench audit transcript"),
        ((*WATCHED, "--claim", "epsilon=3"), "none"),
        (("transcript", "none", "--claim", "epsilon=3"), "--attacks is of the model, and a transcript alone has none"),
    ],
)
def test_mistakes_about_a_transcript_are_one_sentence(leakbench, arguments, told):
    code, out, err = leakbench(*arguments, "--no-gradients", "--attacks", "loss_threshold")
    assert code == 2
    assert out == ""
    assert told in err
