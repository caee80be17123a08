def test_it_recovers_the_weights(run_example):
    done = run_example("01_all_reduce.py")
    assert done.returncode == 0, done.stderr
    assert "weights [2.0, -3.0, 0.5], expected [2.0, -3.0, 0.5]" in done.stdout
    assert "bias 1.0, expected 1.0" in done.stdout
    assert "mean over 8 devices" in done.stdout


def test_it_stays_short(examples_folder):
    assert len((examples_folder / "01_all_reduce.py").read_text().splitlines()) < 50
