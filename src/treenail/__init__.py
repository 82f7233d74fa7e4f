"""Treenail: a runtime for LLM agents whose runs can be trusted.

The stub beside this file lists the quickstart's names; each is loaded when it is first used, so that
`import treenail` costs next to nothing. Stores and providers are imported by path, such as
`treenail.log.sqlite.SqliteLog` and `treenail.providers.scripted.ScriptedProvider`; the rooms' doors
(`treenail.state`, `treenail.tools`, ...) list the rest.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
