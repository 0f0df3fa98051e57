"""`train` at the keyboard: its table, its refusals."""


def test_a_head_is_trained_and_drafts(run, model, tmp_path):
    out = tmp_path / "head"
    how = ("--minutes", "0.15", "--length", "32", "--batch", "4", "--depth", "2", "--device", "cpu")
    said = run("train", "--target", model, "--out", str(out), *how)
    assert said.status == 0, said.err
    assert "code-editing" in said.out
    assert "T=0.7 top-p 0.9" in said.out
    generated = run(
        "generate", "--target", model, "--drafter", f"head:{out}", "-n", "8", "--device", "cpu", "the fox", "--stats"
    )
    assert generated.status == 0, generated.err


def test_a_folder_that_is_taken_is_refused_in_one_line(run, model, tmp_path):
    (tmp_path / "mine").write_text("mine")
    said = run("train", "--target", model, "--out", str(tmp_path))
    assert said.status == 2
    assert "give --resume to go on with it, or another --out" in said.err
    assert "Traceback" not in said.err
