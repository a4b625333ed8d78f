"""Strict YAML configs: `loader` turns them into plain dataclasses. The YAML and JSON files here are shipped with the
package.
"""
