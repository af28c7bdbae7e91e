package static_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/compose-spec/compose-go/v2/cli"
	"github.com/compose-spec/compose-go/v2/types"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/deploy"
	"github.com/onceledger/onceledger/internal/kafka"
)

// debeziumProfile has what runs only when it is asked for.
const debeziumProfile = "debezium"

// load reads docker-compose.yml, with all profiles, the way Docker Compose does: what can be checked
// of it without a Docker engine.
func load(t *testing.T, environ ...string) *types.Project {
	t.Helper()
	options, err := cli.NewProjectOptions([]string{filepath.Join(root, "docker-compose.yml")},
		cli.WithEnv(environ), cli.WithProfiles([]string{debeziumProfile}))
	require.NoError(t, err)
	project, err := options.LoadProject(t.Context())
	require.NoError(t, err)
	return project
}

func TestComposeServices(t *testing.T) {
	t.Parallel()

	project := load(t)
	oneShots := map[string]bool{"debezium": true}
	for _, service := range project.Services {
		for name, dependency := range service.DependsOn {
			if dependency.Condition == types.ServiceConditionCompletedSuccessfully {
				oneShots[name] = true
			}
		}
	}
	require.ElementsMatch(t,
		[]string{"postgres", "kafka", "migrate", "passwords", "topics", "key", "worker", "api", "connect", "debezium"}, project.ServiceNames())
	for name, service := range project.Services {
		optional := name == "connect" || name == "debezium"
		require.Equal(t, optional, slices.Equal(service.Profiles, []string{debeziumProfile}), name)
	}

	for name, service := range project.Services {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			require.Regexp(t, pinned, service.Image)
			if service.Build != nil {
				require.FileExists(t, filepath.Join(service.Build.Context, service.Build.Dockerfile))
			}
			require.Regexp(t, `^[1-9][0-9]*:[1-9][0-9]*$`, service.User, "it must not run as root")
			if oneShots[name] {
				require.Nil(t, service.HealthCheck)
				require.Contains(t, service.Restart, "on-failure")
			} else {
				require.NotNil(t, service.HealthCheck, "neither a health check nor one that ends by itself")
				require.NotEmpty(t, service.HealthCheck.Test)
			}
			for _, mount := range service.Volumes {
				if mount.Type == types.VolumeTypeBind {
					require.FileExists(t, mount.Source)
				}
			}
			for _, port := range service.Ports {
				require.Equal(t, "127.0.0.1", port.HostIP, "a developer's stack is not for the network")
			}
		})
	}
}

// pinned is an image with a version that is one, and not "latest" or none.
var pinned = regexp.MustCompile(`^[a-z/-]+:(\d+(\.\d+)*(_\d+)?(-[a-z]+(-[a-z]+-\d+)?)?|[a-z]+-slim|dev)$`)

func TestPinned(t *testing.T) {
	t.Parallel()

	for _, image := range []string{"postgres", "postgres:latest", "debian:bookworm", "maven:eclipse-temurin", "apache/kafka:"} {
		require.NotRegexp(t, pinned, image)
	}
}

func TestDockerfileImagesArePinned(t *testing.T) {
	t.Parallel()

	text, err := os.ReadFile(filepath.Join(root, "Dockerfile"))
	require.NoError(t, err)
	project := load(t)
	// Each stage's image, name and user.
	stages := strings.Split("\n"+string(text), "\nFROM ")[1:]
	users := make(map[string]string)
	for _, stage := range stages {
		first, rest, _ := strings.Cut(stage, "\n")
		image, name, _ := strings.Cut(first, " AS ")
		require.Regexp(t, pinned, image)
		for _, user := range regexp.MustCompile(`(?m)^USER (\S+)$`).FindAllStringSubmatch(rest, -1) {
			users[name] = user[1]
		}
	}
	require.Equal(t, map[string]string{
		"connect": project.Services["connect"].User,
		"":        project.Services["api"].User, // the last stage has no name
	}, users)
	require.Empty(t, project.Services["api"].Build.Target)
	require.Equal(t, "connect", project.Services["connect"].Build.Target)
}

// TestComposeRunsWhatTheTestsRun: the settings in the containers are the files
// that package devstack runs the same programs with.
func TestComposeRunsWhatTheTestsRun(t *testing.T) {
	t.Parallel()

	project := load(t)
	for _, file := range []struct{ service, inside, inTests, named string }{
		{"postgres", "/etc/onceledger/postgresql.conf", string(deploy.PostgresSettings), "config_file=/etc/onceledger/postgresql.conf"},
		// The image looks there by itself.
		{"kafka", "/mnt/shared/config/server.properties", deploy.KafkaServer, ""},
		{"connect", "/etc/onceledger/worker.properties", deploy.ConnectWorker, "cat /etc/onceledger/worker.properties -"},
		{"connect", "/etc/onceledger/log4j2.properties", deploy.JavaLogging, "-Dlog4j2.configurationFile=/etc/onceledger/log4j2.properties"},
	} {
		service := project.Services[file.service]
		require.Contains(t, strings.Join(service.Command, " "), file.named)
		at := slices.IndexFunc(service.Volumes, func(v types.ServiceVolumeConfig) bool { return v.Target == file.inside })
		require.GreaterOrEqual(t, at, 0, "%s has no %s", file.service, file.inside)
		require.True(t, service.Volumes[at].ReadOnly)
		text, err := os.ReadFile(service.Volumes[at].Source)
		require.NoError(t, err)
		require.Equal(t, file.inTests, string(text), "%s of %s", file.inside, file.service)
	}

	// What is of the place overrides nothing of them.
	for service, given := range map[string]struct {
		file  string
		place []string
	}{
		"kafka":    {deploy.KafkaServer, kafkaSettings(project.Services["kafka"].Environment)},
		"connect":  {deploy.ConnectWorker, hereDocument(t, project.Services["connect"].Command)},
		"postgres": {string(deploy.PostgresSettings), []string{"listen_addresses"}},
	} {
		require.NotEmpty(t, given.place)
		for _, name := range given.place {
			require.NotRegexp(t, `(?m)^`+regexp.QuoteMeta(name)+`\s*=`, given.file, "%s: %s", service, name)
		}
	}
	require.Subset(t, hereDocument(t, project.Services["connect"].Command), []string{"bootstrap.servers", "listeners", "plugin.path"})
}

// kafkaSettings are the names of what the image adds to server.properties.
func kafkaSettings(environment types.MappingWithEquals) (names []string) {
	for variable := range environment {
		if name, ok := strings.CutPrefix(variable, "KAFKA_"); ok {
			names = append(names, strings.ReplaceAll(strings.ToLower(name), "_", "."))
		}
	}
	return names
}

// hereDocument is the names of the settings that a command adds to a file.
func hereDocument(t *testing.T, command types.ShellCommand) (names []string) {
	t.Helper()
	_, text, found := strings.Cut(strings.Join(command, " "), "<<PLACE\n")
	require.True(t, found)
	text, _, found = strings.Cut(text, "\nPLACE\n")
	require.True(t, found)
	for line := range strings.Lines(text) {
		if name, _, ok := strings.Cut(strings.TrimSpace(line), "="); ok {
			names = append(names, name)
		}
	}
	return names
}

// TestComposeDebezium: the one-shot is the operator's command, with what that asks for.
func TestComposeDebezium(t *testing.T) {
	t.Parallel()

	project := load(t)
	service := project.Services["debezium"]
	require.Equal(t, types.ShellCommand{"onceledger", "relay", "switch", "--to", "debezium"}, service.Command)
	asked := variables(t, "cmd/onceledger")
	for variable := range service.Environment {
		require.Contains(t, asked, variable)
	}
	require.Equal(t, *project.Services["worker"].Environment["RELAY_DATABASE_URL"], *service.Environment["RELAY_DATABASE_URL"])
	require.Equal(t, "http://connect:8083", *service.Environment["CONNECT_URL"])
	require.Contains(t, strings.Join(project.Services["connect"].Command, " "), "listeners=http://0.0.0.0:8083")
	require.Empty(t, project.Services["connect"].Ports, "it tells the database's password")
	for _, dependency := range []string{"worker", "connect"} {
		require.Equal(t, types.ServiceConditionHealthy, service.DependsOn[dependency].Condition)
	}
}

// TestComposeTellsProgramsWhatTheyAsk compares what the services are told with what the programs ask.
func TestComposeTellsProgramsWhatTheyAsk(t *testing.T) {
	t.Parallel()

	asked := variables(t, "internal/config")
	require.Contains(t, asked, "DATABASE_URL")
	for _, name := range []string{"api", "worker"} {
		service := load(t).Services[name]
		require.Equal(t, types.ShellCommand{name}, service.Command)
		require.DirExists(t, filepath.Join(root, "cmd", name))
		for variable := range service.Environment {
			require.Contains(t, asked, variable, "%s is given a variable that no program reads", name)
		}
	}
}

// TestComposeOrder: publication (migrate) before the slot (worker) before the first
// order (api), and the topics before the relay.
func TestComposeOrder(t *testing.T) {
	t.Parallel()

	project := load(t)
	before := func(first, then string) {
		t.Helper()
		var reach func(name string) bool
		reach = func(name string) bool {
			dependencies := project.Services[name].GetDependencies()
			return slices.Contains(dependencies, first) || slices.ContainsFunc(dependencies, reach)
		}
		require.True(t, reach(then), "%s must come before %s", first, then)
	}
	before("postgres", "migrate")
	before("migrate", "passwords")
	before("passwords", "worker")
	before("topics", "worker")
	before("worker", "api")
	before("key", "api")
	before("worker", "debezium")
	before("connect", "debezium")
	require.Equal(t, types.ServiceConditionHealthy, project.Services["api"].DependsOn["worker"].Condition)
}

func TestPostgresServesTheRelay(t *testing.T) {
	t.Parallel()

	for _, setting := range []string{
		"wal_level = logical", "max_slot_wal_keep_size = 4GB", "idle_replication_slot_timeout = 1d", "wal_sender_timeout = 5s",
	} {
		require.Contains(t, string(deploy.PostgresSettings), "\n"+setting+"\n")
	}
}

func TestComposeMakesTheTopics(t *testing.T) {
	t.Parallel()

	require.Contains(t, deploy.KafkaServer, "\nauto.create.topics.enable=false\n")
	_, script, _ := strings.Cut(strings.Join(load(t).Services["topics"].Command, "\n"), "<<TOPICS\n")
	list, _, found := strings.Cut(script, "\nTOPICS\n")
	require.True(t, found)
	var want []string
	for _, topic := range kafka.ServiceTopics(6, 1) {
		want = append(want, topic.Name+" "+topic.Config["cleanup.policy"])
	}
	require.Equal(t, want, strings.Split(list, "\n"))
}

// TestComposePasswords: one variable changes a password at both ends.
func TestComposePasswords(t *testing.T) {
	t.Parallel()

	environ := []string{
		"ONCELEDGER_ADMIN_PASSWORD=s-admin", "ONCELEDGER_API_PASSWORD=s-api", "ONCELEDGER_RELAY_PASSWORD=s-relay",
		"ONCELEDGER_WORKER_PASSWORD=s-worker", "ONCELEDGER_JANITOR_PASSWORD=s-janitor", "ONCELEDGER_VERIFY_PASSWORD=s-verify",
	}
	project := load(t, environ...)
	given := project.Services["passwords"].Environment
	sql, err := os.ReadFile(filepath.Join(root, "deploy", "compose", "passwords.sql"))
	require.NoError(t, err)
	for service, variable := range map[string]string{"api DATABASE_URL": "api", "worker DATABASE_URL": "worker",
		"worker RELAY_DATABASE_URL": "relay", "worker JANITOR_DATABASE_URL": "janitor"} {
		name, url, _ := strings.Cut(service, " ")
		require.Contains(t, *project.Services[name].Environment[url], "onceledger_"+variable+":s-"+variable+"@postgres:5432/onceledger")
	}
	for _, role := range []string{"api", "relay", "worker", "janitor", "verify"} {
		require.Equal(t, "s-"+role, *given[strings.ToUpper(role)+"_PASSWORD"])
		require.Contains(t, string(sql), "ALTER ROLE onceledger_"+role+" PASSWORD")
	}
	require.Equal(t, "s-admin", *project.Services["postgres"].Environment["POSTGRES_PASSWORD"])
	require.Contains(t, *project.Services["migrate"].Environment["DATABASE_URL"], "postgres:s-admin@")
	require.Contains(t, *project.Services["key"].Environment["DATABASE_URL"], "postgres:s-admin@")
}
