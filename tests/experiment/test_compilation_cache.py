"""Where compiled programs are kept, and that nothing fails where they cannot be."""

import jax
import jax.numpy as jnp
import pytest

from rope_jax.experiment import compilation_cache
from rope_jax.experiment.compilation_cache import counted, directory, enable

_NAMES = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_enable_compilation_cache",
)


@pytest.fixture(autouse=True)
def settings(monkeypatch, tmp_path):
    """Jax as a user has it who has set nothing, with a cache directory of its own."""
    before = [getattr(jax.config, name) for name in _NAMES]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in zip(_NAMES, before, strict=True):
        jax.config.update(name, value)


def test_programs_are_kept_in_the_users_cache_directory(tmp_path):
    enable()
    path = directory()
    assert path.parent == tmp_path / "cache" / "rope_jax"
    assert path.is_dir() and path.stat().st_mode & 0o777 == 0o700
    assert jax.config.jax_compilation_cache_dir == str(path)
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.3


def test_each_kind_of_machine_has_its_own(monkeypatch):
    """Else one without AVX-512 would run what another compiled for it."""
    found = []
    for flags in ("flags : avx2", "flags : avx2 avx512f", "flags : avx2"):
        monkeypatch.setattr(compilation_cache, "_instructions", lambda f=flags: f)
        found.append(directory())
    assert found[0] == found[2] != found[1]


def test_without_xdg_it_is_in_the_home_directory(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert directory().parent == tmp_path / ".cache" / "rope_jax"


def test_what_the_user_has_set_stays(monkeypatch):
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "7")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 7.0)
    enable()
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 7
    jax.config.update("jax_compilation_cache_dir", "elsewhere")
    enable()
    assert jax.config.jax_compilation_cache_dir == "elsewhere"


def test_it_can_be_switched_off():
    jax.config.update("jax_enable_compilation_cache", False)
    enable()
    assert jax.config.jax_compilation_cache_dir is None
    assert not directory().exists()


def test_a_place_that_cannot_be_written_costs_a_warning(tmp_path, caplog):
    (tmp_path / "cache").write_text("a file")
    enable()
    assert jax.config.jax_compilation_cache_dir is None
    assert "compiled programs are not kept" in caplog.text


def test_compilations_are_counted():
    with counted() as compiled:
        jax.jit(lambda x: x * 3)(jnp.ones(3))
        jax.jit(lambda x: x * 5)(jnp.ones(3))
    with counted() as none:
        pass
    assert compiled.count >= 2 and compiled.seconds > 0
    assert (none.count, none.seconds) == (0, 0.0)
    assert str(none) == "compiled 0 programs in 0.0 s"
