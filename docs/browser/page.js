// The page of the lessons: an editor for each function of a task, and what the tests say of it.
const at = (id) => document.getElementById(id);
const lessons = await (await fetch("lessons.json")).json();
const tasks = lessons.flatMap((l) => l.tasks.map((task) => ({ module: l.module, ...task })));
const kept = (key, otherwise) => localStorage.getItem(`minitorch ${key}`) ?? otherwise;
const keep = (key, value) => localStorage.setItem(`minitorch ${key}`, value);
const name = (body) => JSON.stringify(body.key);
const written = (module) =>
  JSON.stringify(
    tasks
      .filter((task) => task.module === module)
      .flatMap((task) => task.bodies)
      .map((body) => [body.key, kept(name(body), body.body)]),
  );

let worker, answered, current;

function begin() {
  worker = new Worker("worker.js", { type: "module" });
  at("state").textContent = "Starting Python …";
  worker.onmessage = ({ data }) => {
    if (data.ready) at("state").textContent = "Python is ready.";
    else if (answered) answered(data);
    else at("state").textContent = `Python did not start: ${data.error}`;
    busy(!data.ready && !data.result && !answered);
  };
  busy(true);
}

function busy(is) {
  at("run").disabled = at("draw").disabled = is;
}

// Ask Python for something; a call that was stopped has no answer.
function ask(...call) {
  busy(true);
  at("stop").disabled = false;
  return new Promise((resolve) => {
    answered = (data) => {
      answered = undefined;
      at("stop").disabled = true;
      busy(false);
      resolve(data);
    };
    worker.postMessage(call);
  });
}

function show(task) {
  current = task;
  keep("task", task.id);
  for (const button of at("tasks").children) button.classList.toggle("current", button.id === task.id);
  at("title").textContent = `${task.id} ${task.title} (${task.points} points)`;
  at("hint").textContent = task.hint;
  at("mark").textContent = at("said").textContent = "";
  at("bodies").replaceChildren(...task.bodies.flatMap(editor));
  at("drawing").hidden = task.module !== 1;
}

function editor(body) {
  const before = document.createElement("pre");
  before.textContent = `# ${body.key[0]}: ${body.key[2]}\n${body.before}`;
  const text = document.createElement("textarea");
  text.spellcheck = false;
  text.ariaLabel = body.key[2];
  text.value = kept(name(body), body.body);
  const fit = () => (text.rows = Math.max(3, text.value.split("\n").length + 1));
  fit();
  text.oninput = () => {
    keep(name(body), text.value);
    fit();
  };
  return [before, text];
}

function mark(task, is_right, text) {
  at("mark").textContent = text;
  at("mark").className = is_right ? "passed" : "failed";
  at(task.id).classList.toggle("passed", is_right);
  keep(`passed ${task.id}`, is_right ? "yes" : "no");
}

at("run").onclick = async () => {
  const task = current;
  at("mark").textContent = "Running …";
  const { result, error } = await ask("grade", task.module, task.mark, written(task.module));
  const [is_right, passed, failed, said] = result ?? [false, 0, 0, error];
  const points = is_right ? task.points : 0;
  mark(task, is_right, `${points} of ${task.points} points: ${passed} tests passed, ${failed} failed`);
  at("said").textContent = said;
};

at("stop").onclick = () => {
  worker.terminate();
  answered = undefined;
  at("stop").disabled = true;
  at("mark").textContent = "Stopped.";
  begin();
};

at("reset").onclick = () => {
  current.bodies.forEach((body) => localStorage.removeItem(`minitorch ${name(body)}`));
  show(current);
};

at("draw").onclick = async () => {
  const { result, error } = await ask("draw", written(1), at("expression").value);
  const [svg, text] = result ?? ["", error];
  at("graph").innerHTML = svg;
  at("slopes").textContent = text;
};

for (const task of tasks) {
  const button = document.createElement("button");
  button.id = task.id;
  button.textContent = task.id;
  button.title = task.title;
  button.classList.toggle("passed", kept(`passed ${task.id}`) === "yes");
  button.onclick = () => show(task);
  at("tasks").append(button);
}
show(tasks.find((task) => task.id === kept("task")) ?? tasks[0]);
begin();
