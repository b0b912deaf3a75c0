"""The names of argparse and jsonargparse that are not public, and that `config/flags.py` relies on."""

from jsonargparse import ArgumentParser

from llmdistill.config.flags import actions, is_list, type_of

TRIED = "config/flags.py was tried with jsonargparse 4.49 and 4.53 on Python 3.11"


def test_private_names_are_there():
    parser = ArgumentParser()
    assert hasattr(parser, "_actions"), f"ArgumentParser has no _actions any more; {TRIED}"
    added = parser.add_argument("--number", type=int)
    assert hasattr(added, "_typehint"), f"an action of jsonargparse has no _typehint any more; {TRIED}"


def test_flags_and_their_types():
    parser = ArgumentParser()
    hints = {"number": int | None, "names": list[str], "maybe": list[int] | None, "text": list[str] | str}
    for name, hint in hints.items():
        parser.add_argument(f"--{name}", type=hint)
    of_name = {action.dest: action for action in actions(parser)}
    assert of_name.keys() == {"help", *hints}
    assert {name: type_of(of_name[name]) for name in hints} == hints
    assert type_of(of_name["help"]) is None
    assert [name for name, action in of_name.items() if is_list(action)] == ["names", "maybe"]
