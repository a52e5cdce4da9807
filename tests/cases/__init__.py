"""The public cases (failures that people met with other checkpoint tools), each tried on tierload from end to end.

A test's name carries the case's id: ``test_b22_…``. A package, so that its files may be called like those of others.
"""
