// Python in a thread of its own, so that a loop without end can be stopped and the page stays alive.
import { loadPyodide } from "./pyodide/pyodide.mjs";

async function bytes(url) {
  const answer = await fetch(url);
  if (!answer.ok) throw new Error(`${url}: ${answer.status}`);
  return await answer.arrayBuffer();
}

async function begin() {
  const parts = ["packages.zip", "module-0.zip", "module-1.zip", "lesson.py"].map(bytes);
  const python = await loadPyodide();
  const [packages, ...trees] = await Promise.all(parts);
  python.unpackArchive(packages, "zip", { extractDir: "/packages" });
  [0, 1].forEach((n) => python.unpackArchive(trees[n], "zip", { extractDir: `/trees/${n}` }));
  python.FS.writeFile("/packages/lesson.py", new Uint8Array(trees[2]));
  python.runPython("import sys; sys.path[:0] = ['/packages']");
  return python.pyimport("lesson");
}

const lesson = begin();
lesson.then(
  () => postMessage({ ready: true }),
  (error) => postMessage({ error: String(error) }),
);
onmessage = async ({ data: [name, ...args] }) => {
  try {
    postMessage({ result: JSON.parse((await lesson)[name](...args)) });
  } catch (error) {
    postMessage({ error: String(error) });
  }
};
