"""Ranks that differ in something that must be the same, in loops of one's own: see the cases in the loop."""

from pathlib import Path

from tests.e2e.ranks import Job, compiled, run_all

LOOP = Path(__file__).resolve().parent / "loops" / "differ.py"


def test_a_difference_between_ranks_is_an_error_on_all_of_them(tmp_path: Path) -> None:
    both, tied = compiled(tmp_path, "chimera", D=2, N=4), compiled(tmp_path, "dapple", ("0,1",), D=2, N=4)
    job = Job("differ", LOOP, (str(both), str(tied), str(tmp_path / "saved")), model=None)
    run_all(tmp_path, 2, [job])["differ"].assert_passed()
