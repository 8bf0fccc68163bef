"""Two checkpoints must not pass for one, and one must not pass for two."""

from pathlib import Path

from kvmigrate.connector.model_digest import PIECE_BYTES, PIECES, digest_of_model


def make_model(directory: Path, weights: bytes, config: str = "{}") -> Path:
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(weights)
    (directory / "config.json").write_text(config)
    return directory


def test_the_same_files_in_another_place_have_the_same_digest(tmp_path: Path) -> None:
    weights = bytes(range(256)) * 64
    assert digest_of_model(make_model(tmp_path / "a", weights)) == digest_of_model(make_model(tmp_path / "b", weights))


def test_one_byte_of_a_small_file_changes_it(tmp_path: Path) -> None:
    assert digest_of_model(make_model(tmp_path / "a", b"\0" * 1000)) != digest_of_model(
        make_model(tmp_path / "b", b"\0" * 500 + b"\1" + b"\0" * 499)
    )


def test_the_configuration_counts(tmp_path: Path) -> None:
    assert digest_of_model(make_model(tmp_path / "a", b"w")) != digest_of_model(
        make_model(tmp_path / "b", b"w", '{"rope_theta": 1}')
    )


def test_a_large_file_is_sampled_over_its_whole_length(tmp_path: Path) -> None:
    size = PIECE_BYTES * PIECES * 4
    digests = set()
    for index in range(PIECES):
        weights = bytearray(size)
        weights[(size - PIECE_BYTES) * index // (PIECES - 1) + PIECE_BYTES // 2] = 1
        digests.add(digest_of_model(make_model(tmp_path / str(index), bytes(weights))))
    assert len(digests) == PIECES


def test_an_empty_directory_identifies_nothing(tmp_path: Path) -> None:
    assert digest_of_model(tmp_path) == ""
