// Remove all build outputs, so that no stale file is shipped.

import { rm } from 'node:fs/promises';

for (const path of [
  'lib',
  '../tfd_notebook/labextension',
  '../tfd_notebook/ui/widgets/static/widget.js'
]) {
  await rm(path, { force: true, recursive: true });
}
