import subprocess
import sys

from pipeline.fetcher.gym import generator_modules, make_generator


def test_one_generator_does_not_draw_in_the_others_and_the_package_still_works():
    script = (
        "import sys\n"
        "from pipeline.fetcher.gym import make_generator\n"
        "made = make_generator('chain_sum', {'max_terms': 3}, seed=1, size=5)\n"
        "assert not {'sympy', 'matplotlib'} & set(sys.modules), 'heavy'\n"
        "import reasoning_gym\n"
        "whole = reasoning_gym.create_dataset('chain_sum', max_terms=3, seed=1, size=5)\n"
        "assert [made[n] for n in range(5)] == [whole[n] for n in range(5)]\n"
        "assert type(made) is type(whole)\n"
        "import reasoning_gym.arithmetic.chain_sum as module\n"
        "assert module.ChainSumDataset is type(made)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_every_generator_is_found():
    modules = generator_modules()
    assert len(modules) > 100
    assert modules["acre"] == "reasoning_gym.induction.acre.acre"
    for name in ("spell_backward", "acre", "power_function", "family_relationships"):
        assert make_generator(name, {}, seed=0, size=2)[1]["question"]
